"""What audits read of a stopped run: the ranks' training logs, the branches and the commits, as plain JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import CorruptDataError, reason_of


@dataclass(frozen=True)
class AuditReport:
    """Counts of groups along the newest branch; the lists name what is wrong."""

    generated: int
    trained: int
    pending: int
    in_flight: int
    dropped: dict[str, int]
    rolled_back: int
    """Groups trained by an optimizer step that a later resume took back."""
    lost: list[str]
    trained_twice: list[str]

    @property
    def identity_holds(self) -> bool:
        return self.generated == self.trained + self.pending + self.in_flight + sum(self.dropped.values())


_SHARE = ("data_parallel_rank", "group_indices", "sample_indices")
"""Of an entry of a training log."""
_RESTORE = "Restore it from a copy."

Step = tuple[tuple[str, int, int], set[int], list[int]]
"""(branch, rollout, step), groups, samples of all ranks."""


def training_steps(run: Path) -> Iterator[Step]:
    groups: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    samples: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    seen: set[tuple[tuple[str, int, int], int]] = set()
    for path in sorted((run / "training_log").glob("rank_*.jsonl")):
        for line in _lines(path, "branch", "rollout_id", "step", *_SHARE):
            key = (line["branch"], line["rollout_id"], line["step"])
            replica = (key, line["data_parallel_rank"])
            if replica in seen:
                continue  # tensor- and pipeline-parallel ranks of one replica train the same samples
            seen.add(replica)
            groups[key].update(line["group_indices"])
            samples[key] += line["sample_indices"]
    for key in sorted(groups, key=lambda key: key[1:]):
        yield key, groups[key], samples[key]


def read_branches_raw(run: Path) -> dict[str, dict[str, Any]]:
    """Branch -> its line, in the order they began."""
    return {
        line["branch"]: line for line in _lines(run / "rollout" / "branches.jsonl", "branch", "parent", "directory")
    }


def branch_limits(branches: dict[str, dict[str, Any]], log: Iterable[Step]) -> dict[str, int]:
    """Branch -> last rollout of it that counts, for the newest branch and its ancestors."""
    if not branches:
        return {}
    name = list(branches)[-1]
    last = max((rollout for (_, rollout, _), _, _ in log), default=-1)
    limits = {name: last}
    while (parent := branches[name]["parent"]) is not None:
        name = parent["branch"]
        limits[name] = parent["rollout_id"]
    return limits


def split_steps(log: Iterable[Step], counted: dict[str, int]) -> tuple[list[Step], list[Step]]:
    trained: list[Step] = []
    rolled_back: list[Step] = []
    for step in log:
        branch, rollout, _ = step[0]
        (trained if rollout <= counted.get(branch, -1) else rolled_back).append(step)
    return trained, rolled_back


def newest_commit(run: Path, branches: dict[str, dict[str, Any]], counted: dict[str, int]) -> tuple[int, Path] | None:
    """Rollout and path of the newest commit among those that count."""
    newest: tuple[int, Path] | None = None
    for branch, last in counted.items():
        for path in (run / branches[branch]["directory"] / "rollout").glob("committed_*.json"):
            record = raw_record(path, "branch", "rollout_id")
            if record["branch"] == branch and record["rollout_id"] <= last:
                newest = max(newest or (-1, path), (record["rollout_id"], path))
    return newest


def sample_twice(steps: Iterable[Step]) -> list[str]:
    """Samples of more than one step; segments of one rollout share their number, and are trained in one step."""
    counts = Counter(sample for _, _, samples in steps for sample in set(samples))
    return [f"sample {sample}: trained {count} times" for sample, count in sorted(counts.items()) if count > 1]


def partly_trained(steps: Iterable[Step]) -> list[str]:
    """Groups of which fewer samples were trained than of the others (all groups have the same size)."""
    groups: set[int] = set()
    numbers: list[int] = []
    for _, step_groups, step_samples in steps:
        groups |= step_groups
        numbers += step_samples
    if not groups:
        return []
    size = max(1, round(len(set(numbers)) / len(groups)))
    samples = Counter(number // size for number in set(numbers))
    return [
        f"group {group}: {samples[group]} of {size} samples trained"
        for group in sorted(groups)
        if samples[group] != size
    ]


def raw_record(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `CorruptDataError` for another content, or one without these keys."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} can't be read: {reason_of(error)}.", next_step=_RESTORE) from error
    return _with_keys(record, keys, str(path))


def _lines(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """JSON lines of a log; a torn line (a crash while writing it) is no fact and is left out.

    Raises `CorruptDataError` for a file that can't be read, and for a line without these keys.
    """
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CorruptDataError(f"{path} can't be read: {reason_of(error)}.", next_step=_RESTORE) from error
    for number, line in enumerate(lines, start=1):
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            yield _with_keys(parsed, keys, f"{path}:{number}")


def _with_keys(record: Any, keys: Sequence[str], place: str) -> dict[str, Any]:
    missing = [key for key in keys if not isinstance(record, dict) or key not in record]
    if not isinstance(record, dict) or missing:
        raise CorruptDataError(f"{place} has no {', '.join(missing) or 'object'}.", next_step=_RESTORE)
    return record
