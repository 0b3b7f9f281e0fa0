"""What a producer's groups are at, for whoever asks why nothing arrives."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from vime.utils.types import Sample


class Phase(enum.Enum):
    """What a group waits for."""

    GENERATING = "generating"
    REWARD = "in reward"
    WRITING = "being written"
    """Made, and on its way into the queue."""


class GroupActivity(msgspec.Struct, frozen=True, gc=False):
    """One group."""

    phase: Phase
    age_s: float
    """How long the oldest member has been at it."""
    num_tokens: int = 0
    """Response tokens that its members have so far."""


class ProducerActivity(msgspec.Struct, frozen=True):
    """What a producer says of itself."""

    groups: list[GroupActivity]
    is_admitted: bool
    """Whether requests may start."""
    reward: str
    """What scores the samples."""


class _Doing:
    """One member at one thing."""

    def __init__(self, phase: Phase, group_index: int, samples: list[Sample], since: float) -> None:
        self.phase, self.group_index, self.samples, self.since = phase, group_index, samples, since


class ActivityBoard:
    """Notes what members of groups begin and end; of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._doing: set[_Doing] = set()
        self._generated: dict[int, int] = {}
        self._ended_s = dict.fromkeys(Phase, 0.0)

    @contextmanager
    def doing(self, phase: Phase, group_index: int, samples: list[Sample]) -> Iterator[None]:
        """While members of a group are in a phase."""
        entry = _Doing(phase, group_index, samples, self._clock())
        self._doing.add(entry)
        try:
            yield
        finally:
            self._doing.discard(entry)
            self._ended_s[phase] += self._sample_seconds(entry)
            if phase is Phase.GENERATING:
                tokens = sum(sample.response_length for sample in samples)
                self._generated[group_index] = self._generated.get(group_index, 0) + tokens

    def ended(self, group_index: int) -> None:
        """Nobody works on the group any more."""
        self._generated.pop(group_index, None)

    def seconds(self, phase: Phase) -> float:
        """How long samples have been in a phase so far, summed over samples."""
        return self._ended_s[phase] + sum(self._sample_seconds(entry) for entry in self._doing if entry.phase is phase)

    def _sample_seconds(self, entry: _Doing) -> float:
        return len(entry.samples) * (self._clock() - entry.since)

    def groups(self) -> list[GroupActivity]:
        """Each group that is worked on; its phase is the earliest that a member of it is in."""
        now = self._clock()
        found: list[GroupActivity] = []
        for group_index in sorted({entry.group_index for entry in self._doing}):
            mine = [entry for entry in self._doing if entry.group_index == group_index]
            phase = next(phase for phase in Phase if any(entry.phase is phase for entry in mine))
            members = [entry for entry in mine if entry.phase is phase]
            tokens = self._generated.get(group_index, 0)
            if phase is Phase.GENERATING:
                tokens += sum(sample.response_length for entry in members for sample in entry.samples)
            found.append(GroupActivity(phase, now - min(entry.since for entry in members), tokens))
        return found
