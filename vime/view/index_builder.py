"""Fills the index of samples from a run's queue: groups as they are accepted, what plans say as they are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.messages import decode
from pipeline.planner import BatchPlan
from pipeline.token_log import read_mean_gaps
from recovery.branch_line import BranchLine
from storage.columns import decode_group, read_header
from storage.packed_fields import FIELDS
from storage.plain_json import to_plain_json
from storage.pool import Pool
from storage.queue_view import GroupView, QueueView
from storage.refs import GroupRef
from vime.errors import CorruptDataError, StorageError
from vime.view.sample_index import Planned, SampleIndex, SampleRow

GROUPS_AT_ONCE = 64


class IndexBuilder:
    """Remembers what the index holds, so that each call adds only what is new."""

    def __init__(self, index: SampleIndex, token_log: Path) -> None:
        """`token_log` is the run's."""
        self._index, self._token_log = index, token_log
        self._closed: set[int] = set()
        """Segments that were closed when they were read: nothing in them changes."""
        self._positions: dict[int, int] = {}
        """Group -> position, of the groups that are in the index."""
        self._states: dict[int, str] = {}
        self._plans: set[str] = set()
        self._trained: set[tuple[str, int]] = set()
        """(branch, rollout) whose gaps are in the index."""
        self._tip: str | None = None
        self.unreadable: dict[int, str] = {}
        """Accepted groups whose payload can't be read, and why; it may be collected once trained."""
        self.damaged: list[str] = []
        """What of the token log can't be read."""

    @property
    def num_groups(self) -> int:
        """Groups in the index."""
        return len(self._positions)

    def refresh(self, pool: Pool, view: QueueView, line: BranchLine, goes_on: Callable[[], bool]) -> None:
        """Bring the index up to date, newest groups first; ends early when `goes_on` says no. Raises `StorageError`."""
        new = self._new_groups(view)
        for first in range(0, len(new), GROUPS_AT_ONCE):
            if not goes_on():
                return
            self._add(pool, new[first : first + GROUPS_AT_ONCE], line)
        self._closed |= {entry.index for entry in view.entries if entry.summary is not None}
        self._note_plans(pool, line)
        self._note_gaps(line)
        self._note_states(line)

    def _new_groups(self, view: QueueView) -> list[GroupView]:
        segments = [
            view.segment(entry.index)
            for entry in view.entries
            if not entry.is_reclaimed and entry.index not in self._closed
        ]
        found = [
            group
            for segment in segments
            for group in segment.groups()
            if group.position is not None
            and group.group_index not in self._positions
            and group.group_index not in self.unreadable
        ]
        return sorted(found, key=lambda group: -group.group_index)

    def _add(self, pool: Pool, groups: list[GroupView], line: BranchLine) -> None:
        rows: list[SampleRow] = []
        for group in groups:
            if group.result_ref is None or group.position is None:
                continue
            state = position_state(group.position, line)
            try:
                rows += group_rows(pool, group.result_ref, state)
            except StorageError as error:
                self.unreadable[group.group_index] = error.message
                continue
            self._positions[group.group_index] = group.position
            self._states[group.group_index] = state
        self._index.add(rows)

    def _note_plans(self, pool: Pool, line: BranchLine) -> None:
        if line.tip != self._tip:
            self._index.forget_plans()
            self._plans.clear()
            self._trained.clear()
            self._tip = line.tip
        for record in line.plans:
            if record.batch_id in self._plans:
                continue
            self._plans.add(record.batch_id)
            try:
                plan = decode(pool.read_blob(record.plan_ref), BatchPlan)
            except StorageError:
                continue  # collected with the groups that it named
            if line.counts(plan.branch, plan.rollout_id):
                self._index.plan(
                    Planned(sample.sample_index, plan.rollout_id, sample.advantage, sample.age_versions)
                    for sample in plan.samples
                )

    def _note_gaps(self, line: BranchLine) -> None:
        for record in line.steps:
            if (record.branch, record.step) in self._trained:
                continue
            self._trained.add((record.branch, record.step))
            try:
                self._index.set_mean_gaps(read_mean_gaps(self._token_log, record.branch, record.step))
            except CorruptDataError as error:
                self.damaged.append(str(error))

    def _note_states(self, line: BranchLine) -> None:
        now = {group: position_state(position, line) for group, position in self._positions.items()}
        changed = {group: state for group, state in now.items() if self._states[group] != state}
        self._index.set_states(changed)
        self._states |= changed


def position_state(position: int, line: BranchLine) -> str:
    """What the newest branch did to an accepted group."""
    if position in line.reclaimed:
        return "reclaimed"
    return "trained" if position in line.trained else "pending"


def group_rows(pool: Pool, ref: GroupRef, state: str) -> list[SampleRow]:
    """The samples of a stored group. Reads its header and its small fields, no tokens. Raises `StorageError`."""
    content = pool.read_header(ref)
    header = read_header(content)
    others = {spec.name for spec in header.columns} - {FIELDS}
    samples = decode_group(content, pool.read_columns(ref, [FIELDS]), leave_out=others)
    summary = header.summary
    sources = summary.source_names or ["unknown"] * len(samples)
    return [
        SampleRow(
            sample_index=summary.sample_indices[member],
            group_index=summary.group_index,
            member=member,
            state=state,
            source=sources[member],
            status=summary.statuses[member],
            reward=summary.rewards[member],
            prompt_tokens=summary.total_lengths[member] - summary.response_lengths[member],
            response_tokens=summary.response_lengths[member],
            trained_tokens=summary.mask_sums[member],
            min_version=summary.min_versions[member],
            max_version=summary.max_versions[member],
            prompt=prompt_text(sample.prompt),
            response=sample.response,
        )
        for member, sample in enumerate(samples)
    ]


def prompt_text(prompt: Any) -> str:
    """A prompt as text: messages of a chat one after the other, each with its role."""
    if isinstance(prompt, str):
        return prompt
    plain = to_plain_json(prompt)
    if isinstance(plain, list) and all(isinstance(message, dict) for message in plain):
        return "\n".join(f"{message.get('role', '')}: {_content(message.get('content', ''))}" for message in plain)
    return _content(plain)


def _content(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
