"""What a start says before it acts: the commit, the groups before and after, tokens to prefill, changed settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.resume_words import resume_words
from pipeline.run_folder import RunFolder
from pipeline.session_start import prepare_start
from storage.columns import encode_group
from storage.queue_types import GroupReturn, Stage
from tests.pipeline import mini_stream
from tests.pipeline.mini_stream import BATCH, MEMBERS, synthetic_group
from tests.pipeline.test_crash import kill_session
from vime.cli.dry_run import start_facts
from vime.data.cursor import PromptTask
from vime.errors import RestoreError
from vime.settings.record import settings_record
from vime.settings.resolve import resolve
from vime.utils.types import Sample


def words_of(run: Path, *changed: str) -> list[str]:
    flags = ["--save", str(run), "--num-rollout", "9", "--rollout-data-transport", "straw", *changed]
    settings = resolve(flags).settings
    folder = RunFolder.of(settings)
    return resume_words(settings, folder, prepare_start(settings, folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts 0 to 2 are trained, 0 and 1 committed; one group was given back with a response begun."""
    tmp_path = tmp_path_factory.mktemp("run")
    kill_session(tmp_path, "plan", 4)
    flags = ["--save", str(tmp_path), "--num-rollout", "9", "--rollout-data-transport", "straw"]
    (tmp_path / "settings.json").write_bytes(settings_record(resolve(flags)))
    stream = mini_stream.MiniStream(tmp_path, rollouts=9)
    try:
        (work,) = stream.coordinator._queue.lease("producer", 1)  # the bound of groups ahead is reached
        prompt = PromptTask(
            group_index=work.group_index,
            first_sample_index=work.group_index * MEMBERS,
            epoch=0,
            row=0,
            prompt="p",
        )
        group = synthetic_group(prompt, 1)
        begun = [replace(group[0], status=Sample.Status.ABORTED, reward=None), group[1]]
        (ref,) = stream._publish([(encode_group(begun), work.lease)])
        assert stream.coordinator.yield_groups([GroupReturn(work.lease, ref, Stage.PARTIAL, 1)]) == [True]
    finally:
        stream.close()
    return tmp_path


def test_a_resume_says_which_commit_what_waits_and_what_is_to_be_prefilled(run: Path) -> None:
    chosen, goes_on, prefill = words_of(run)
    assert chosen == f"Resuming from the commit of rollout 1 (newest); {run} has 1 commit."
    assert goes_on.startswith("Goes on with: generated"), "what was found is the same, and isn't said twice"
    assert f"trained {2 * BATCH} + pending" in goes_on
    assert "1 dropped" not in goes_on
    assert prefill == "3 tokens to prefill again, in 1 group with a response begun."


def test_a_resume_says_what_changed_settings_mean_and_refuses_what_waiting_samples_lack(run: Path) -> None:
    words = words_of(run, "--rollout-temperature", "0.5", "--keep-checkpoints", "3")
    assert words[-2].startswith("--rollout-temperature is 0.5, was 1.0: groups that wait were sampled")
    assert words[-1] == "Changed since the last session, and in effect from now on: --keep-checkpoints."
    with pytest.raises(RestoreError, match="stored without routes"):
        words_of(run, "--use-rollout-routing-replay")


def test_a_dry_run_says_the_same_and_writes_nothing(run: Path) -> None:
    before = sorted(run.rglob("*"))
    flags = ["--save", str(run), "--num-rollout", "9", "--rollout-data-transport", "straw", "--lr", "0.5"]
    words = start_facts(resolve(flags).settings).words
    assert "--lr is 0.5, was 1e-06: the schedule goes on with it from the step that it has reached." in words
    assert any(told.startswith("Goes on with: generated") for told in words)
    with pytest.raises(RestoreError, match="stored without routes"):
        start_facts(resolve([*flags, "--use-rollout-routing-replay"]).settings)
    assert sorted(run.rglob("*")) == before


def test_a_run_whose_settings_are_damaged_is_resumed_and_says_that_nothing_was_compared(run: Path) -> None:
    (run / "settings.json").write_text("{")
    assert any(words.startswith("Settings are not compared") for words in words_of(run))


def test_a_new_run_says_no_more_than_that(tmp_path: Path) -> None:
    assert words_of(tmp_path / "new") == ["New run."]
