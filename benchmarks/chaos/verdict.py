"""What a campaign left behind, judged from journals, payloads and logs alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.chaos.step_log import steps_of
from recovery.audit import audit_run, replay_journals
from recovery.audit_parts import branch_limits, read_branches_raw, split_steps, training_steps
from recovery.run_location import locate_run
from vime.errors import NoRunError

SKIPPED = (": never submitted", ": submitted twice")


class Verdict(msgspec.Struct, frozen=True):
    """What the whole run shows after its last session."""

    lost: list[str] = []
    trained_twice: list[str] = []
    skipped_prompts: list[str] = []
    version_regressions: list[str] = []


def accepted_groups(run: Path) -> set[str]:
    """Groups that the journals of a stopped run accepted and did not drop; none of a run without a queue."""
    try:
        pool = locate_run(run, None).pool
    except NoRunError:
        return set()
    state = replay_journals(pool)
    return set(state.accepted) - set(state.dropped)


def judge(run: Path, owed: set[str]) -> Verdict:
    """Audit a run whose last session has ended well.

    `owed` are groups that were accepted before that session, which was long enough to train them all: one that it has
    not trained is forgotten, though the counts may call it pending.
    """
    report = audit_run(run)
    skipped = [line for line in report.lost if line.endswith(SKIPPED)]
    lost = [line for line in report.lost if line not in skipped]
    if not report.identity_holds:
        lost.append(f"the identity does not hold: {report}")
    lost += [f"{task}: accepted, and passed over for good" for task in sorted(owed - _trained(run))]
    regressions = [
        f"rollout {after['rollout_id']}: version {after['policy_version']} after {before['policy_version']}"
        for before, after in pairwise(steps_of(run))
        if after["policy_version"] < before["policy_version"]
    ]
    return Verdict(lost, list(map(str, report.trained_twice)), skipped, regressions)


def _trained(run: Path) -> set[str]:
    """Groups that count as trained on the newest line of branches, as the journals name them."""
    log = list(training_steps(run))
    counted, _ = split_steps(log, branch_limits(read_branches_raw(run), log))
    return {f"prompt:{group}" for _, groups, _ in counted for group in groups}
