"""What a campaign left behind, judged from journals, payloads and logs alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from straw import RecordSetRef, SharedFilesystemStore

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


def judge(run: Path, owed: set[str], prompts: Sequence[str]) -> Verdict:
    """Audit a run whose last session has ended well.

    `owed` are groups that were accepted before that session, which was long enough to train them all: one that it has
    not trained is forgotten, though the counts may call it pending. `prompts` are all lines of the data set, taken in
    their order again and again.
    """
    report = audit_run(run)
    skipped = [line for line in report.lost if line.endswith(SKIPPED)]
    skipped += _misplaced(run, prompts)
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


def _misplaced(run: Path, prompts: Sequence[str]) -> list[str]:
    """Accepted groups whose payload doesn't hold the prompt whose turn it was."""
    pool = locate_run(run, None).pool
    identity = json.loads(next((pool / "queues").glob("*/run.json")).read_bytes())
    found = []
    with SharedFilesystemStore(pool, identity["run_id"], codecs=identity["codecs"]) as store:
        for task, reference in replay_journals(pool).results.items():
            expected = prompts[int(task.removeprefix("prompt:")) % len(prompts)]
            records = store.read(RecordSetRef.from_dict(reference))
            if not any(expected.encode() in bytes(record.payload) for record in records):
                found.append(f"{task}: made from another prompt than {expected!r}")
    return found


def _trained(run: Path) -> set[str]:
    """Groups that count as trained on the newest line of branches, as the journals name them."""
    log = list(training_steps(run))
    counted, _ = split_steps(log, branch_limits(read_branches_raw(run), log))
    return {f"prompt:{group}" for _, groups, _ in counted for group in groups}
