"""An independent count of a stopped run whose queue was in memory: what counts is its newest commit.

What was generated or trained after that commit ended with the processes; a resume does it again. So groups are counted
as the commit's queue state lists them, and held against what the ranks logged up to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery.audit_parts import (
    AuditReport,
    branch_limits,
    newest_commit,
    partly_trained,
    raw_record,
    read_branches_raw,
    sample_twice,
    split_steps,
    training_steps,
)


def is_in_memory(run: Path) -> bool:
    """Whether the run in this folder keeps its queue in memory."""
    return (run / "rollout" / "step_log").is_dir()


def audit_memory_run(run: Path) -> AuditReport:
    """Audit a run folder whose processes have stopped."""
    branches = read_branches_raw(run)
    log = list(training_steps(run))
    limits = branch_limits(branches, log)
    commit = newest_commit(run, branches, limits)
    last = -1 if commit is None else commit[0]
    trained_steps, rolled_back = split_steps(log, {branch: min(limit, last) for branch, limit in limits.items()})
    trained = {group for _, groups, _ in trained_steps for group in groups}
    state = {} if commit is None else raw_record(commit[1].with_name(f"queue_state_{last}.json"))
    identity = state.get("identity", {})
    return AuditReport(
        generated=identity.get("generated", 0),
        trained=len(trained),
        pending=identity.get("pending", 0),
        in_flight=identity.get("in_flight", 0),
        dropped=state.get("memory", {}).get("dropped", {}),
        rolled_back=len({group for _, groups, _ in rolled_back for group in groups}),
        lost=[*_skipped(state, trained), *partly_trained(trained_steps)],
        trained_twice=sample_twice(trained_steps),
    )


def _skipped(state: dict[str, Any], trained: set[int]) -> list[str]:
    """Groups before the commit's cursor that are in none, or in two, of its parts."""
    if not state:
        return []
    submitted, memory = state["next_group_index"], state["memory"]
    unfinished = {group for first, last in memory["unfinished"] for group in range(first, last + 1)}
    wrong = [f"group {group}: trained, but the commit calls it unfinished" for group in sorted(trained & unfinished)]
    wrong += [
        f"group {group}: lies past the commit's cursor {submitted}"
        for group in sorted(trained | unfinished)
        if group >= submitted
    ]
    dropped = sum(memory["dropped"].values())
    elsewhere = submitted - len(trained | unfinished)
    if elsewhere != dropped:
        wrong.append(
            f"{elsewhere} of {submitted} groups are neither logged as trained nor unfinished, {dropped} were dropped"
        )
    return wrong
