"""What keeps payloads in the pool beside the queue itself, and which results nothing needs any more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from storage.files import make_folder, write_atomically
from storage.os_errors import os_error
from storage.positions import PositionRanges
from storage.refs import PoolRef
from vime.errors import CorruptDataError


class _Released(msgspec.Struct, frozen=True):
    """`vime/released.json`."""

    ranges: list[tuple[int, int]]
    schema_version: int = 1


class _Retained(msgspec.Struct, frozen=True):
    """One file in `vime/retained/`."""

    owner: str
    packs: list[str]


_File = TypeVar("_File")


class Retention:
    """Released positions and explicit owners of one pool.

    Only the holder of the coordinator lock releases positions; an owner's claims are its own to make and to end.
    """

    def __init__(self, control_dir: Path) -> None:
        """Raises `CorruptDataError` when the record of released positions can't be read."""
        self._released_path = control_dir / "released.json"
        self._owners = control_dir / "retained"
        self.released = PositionRanges()
        """Positions whose payloads may be gone. A payload never goes before its position is here, on disk."""
        if self._released_path.exists():
            self.released = PositionRanges(_read(self._released_path, _Released).ranges)

    def release(self, positions: PositionRanges) -> None:
        """Let go of results, for good. Raises `StorageError`; nothing is released then."""
        ranges = PositionRanges([*self.released.ranges(), *positions.ranges()])
        if ranges != self.released:
            write_atomically(self._released_path, msgspec.json.encode(_Released(ranges.ranges())))
            self.released = ranges

    def retain(self, owner: str, refs: Sequence[PoolRef]) -> None:
        """Keep what `refs` point to until `owner` lets go; replaces what the owner had."""
        make_folder(self._owners)
        packs = sorted({ref.path for ref in refs})
        write_atomically(self._path(owner), msgspec.json.encode(_Retained(owner, packs)))

    def let_go(self, owner: str) -> None:
        """End an owner's claims; one that has none is no error."""
        try:
            self._path(owner).unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, self._path(owner), 0) from error

    def owners(self) -> dict[str, list[str]]:
        """Owner -> the packs that it keeps, relative to the pool."""
        return {kept.owner: kept.packs for path in self._owners.glob("*.json") for kept in [_read(path, _Retained)]}

    def retained_packs(self) -> set[str]:
        """Packs that owners keep, relative to the pool."""
        return {pack for packs in self.owners().values() for pack in packs}

    def _path(self, owner: str) -> Path:
        return self._owners / f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}.json"


def _read(path: Path, kind: type[_File]) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptDataError(f"{path} can't be read: {error}.", next_step="Restore it from a copy.") from error
