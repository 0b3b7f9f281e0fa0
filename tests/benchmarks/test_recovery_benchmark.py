"""The recovery benchmark measures what it says, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery.__main__ import history_ratios, juicefs_gaps, main
from benchmarks.recovery.failover import failover_gaps
from benchmarks.recovery.restart import job_in, restart_over_cold_start, started
from tests.juicefs.two_mounts import why_impossible


def test_the_history_part_opens_both_queues_in_fresh_processes(tmp_path: Path) -> None:
    values = history_ratios(tmp_path, 200, repeats=1)
    assert values["history_ratio"] == [values["history_s_long"][0] / values["history_s_short"][0]]


def test_the_parts_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "everything"])
    assert "'restart', 'history', 'failover', 'juicefs'" in capsys.readouterr().err


def test_a_job_that_ends_before_its_first_step_is_an_error(tmp_path: Path) -> None:
    job = job_in(tmp_path, standin=True)
    with pytest.raises(RuntimeError, match="status 1 before step 1"), started(job, standin=True) as session:
        session.wait_for_steps(1)
    assert session.marked.alive() == []


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_a_restart_after_the_death_of_the_whole_tree_is_timed_against_a_cold_start(tmp_path: Path) -> None:
    values = restart_over_cold_start(tmp_path, standin=True, repeats=1)
    assert values["cold_start_s_standin"][0] > 0
    assert values["kill_to_step_over_cold_start_standin"][0] < 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["prepared_standin"]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_the_stream_goes_on_soon_after_each_death_of_its_coordinator(tmp_path: Path) -> None:
    gaps = failover_gaps(tmp_path, repeats=2)["failover_gap_s"]
    assert len(gaps) == 2
    assert max(gaps) < 30.0


@pytest.mark.slow
@pytest.mark.juicefs
@pytest.mark.timeout(300)
def test_a_successor_opens_the_queue_soon_after_the_lock_of_a_dead_client_is_free(tmp_path: Path) -> None:
    reason = why_impossible(tmp_path)
    if reason:
        pytest.skip(reason)
    values = juicefs_gaps(tmp_path, repeats=1)
    assert values["juicefs_lock_release_s"][0] > 1.0
    assert values["juicefs_gap_over_release_s"][0] < 5.0
