"""What a session tells its coordinator, and what it counts as its own."""

import pytest

from pipeline.batch_wait import WAITING_BATCHES_VARIABLE
from pipeline.failed_fraction import this_session
from pipeline.messages import QueueCounts
from pipeline.session_start import Start, coordinator_config
from recovery.accounting import Identity
from recovery.commit import QueueState
from recovery.restore import RestoreMode, RestorePlan
from vime.settings.groups import Settings
from vime.settings.resolve import resolve


def settings(*words: str) -> Settings:
    return resolve(["--num-rollout", "6", *words]).settings


def resumed(trained: int, start_rollout: int) -> Start:
    plan = RestorePlan(RestoreMode.RESUME, ".", start_rollout, ".", start_rollout - 1)
    return Start(plan, "branch", None, None, QueueState([(0, trained - 1)], trained, {}))


def test_a_new_run_wants_all_its_batches() -> None:
    start = Start(RestorePlan(RestoreMode.NEW, ".", 0), "branch", None, None, None)
    config = coordinator_config(settings("--rollout-batch-size", "8"), start, "s")
    assert (config.groups_wanted, config.max_groups, config.trained) == (48, 16, [])


def test_a_resume_with_another_batch_size_wants_what_its_own_batches_need() -> None:
    for batch in (4, 8, 16):
        config = coordinator_config(settings("--rollout-batch-size", str(batch)), resumed(24, 3), "s")
        assert config.groups_wanted - 24 == 3 * batch


def test_only_an_experiment_with_waiting_batches_begins_no_group_before_a_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings("--rollout-batch-size", "8"), resumed(24, 3), "s"
    assert not coordinator_config(*given).newest_only
    monkeypatch.setenv(WAITING_BATCHES_VARIABLE, "4")
    assert coordinator_config(*given).newest_only


def counts(generated: int, dropped: dict[str, int]) -> QueueCounts:
    return QueueCounts(generated, 0, 0, 0, dropped, 0, False)


def test_groups_that_an_earlier_session_set_aside_do_not_stop_this_one() -> None:
    at_start = Identity(generated=40, trained=16, pending=4, in_flight=8, dropped={"reward": 12})
    assert this_session(counts(40, {"reward": 12}), at_start) == ({}, 8)
    assert this_session(counts(52, {"reward": 13, "engine": 1}), at_start) == ({"reward": 1, "engine": 1}, 20)
