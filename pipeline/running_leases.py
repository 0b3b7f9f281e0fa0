"""Groups that producers work on, and the leases under which they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from storage.lease_board import LeaseBoard


class RunningLease(msgspec.Struct, frozen=True):
    """A group in flight."""

    group_index: int
    lease: bytes
    version: int
    """Oldest policy version that its tokens can have."""
    worker_id: str


class RunningLeases:
    """At most one lease for each group: the newest. All of them are on the board that people look at."""

    def __init__(self, board: LeaseBoard) -> None:
        self._board = board
        self._of_groups: dict[int, RunningLease] = {}

    def __len__(self) -> int:
        return len(self._of_groups)

    def __iter__(self) -> Iterator[RunningLease]:
        return iter(self._of_groups.values())

    def begin(self, leases: Iterable[RunningLease]) -> None:
        """These begin now."""
        begun = list(leases)
        self._of_groups |= {item.group_index: item for item in begun}
        self._board.leased(item.lease for item in begun)

    def extended(self, leases: Iterable[bytes]) -> None:
        """A heartbeat came for these."""
        self._board.extended(leases)

    def end(self, leases: Iterable[bytes]) -> None:
        """These are over; those of other attempts at the same groups go on."""
        ended = set(leases)
        for lease in ended:
            self._board.ended(lease)
        self._of_groups = {group: held for group, held in self._of_groups.items() if held.lease not in ended}

    def end_of_group(self, group_index: int, lease: bytes) -> None:
        """As `end`, for one lease whose group is known: without a look at the others."""
        self._board.ended(lease)
        held = self._of_groups.get(group_index)
        if held is not None and held.lease == lease:
            del self._of_groups[group_index]

    def of_processes(self, worker_name: str) -> list[bytes]:
        """Leases of all processes of that name."""
        return [held.lease for held in self if held.worker_id.startswith(f"{worker_name}-")]

    def oldest_version(self, at_most: int) -> int:
        """Oldest policy version that a token of these groups can have; `at_most` where none is older."""
        return min([at_most, *(held.version for held in self)])

    def show(self) -> None:
        """Bring the board up to date, unless that was done a moment ago."""
        self._board.write_if_due()
