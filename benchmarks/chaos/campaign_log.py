"""What a campaign remembers of its kills, in its folder, from one invocation to the next."""

from __future__ import annotations

from pathlib import Path

import msgspec

from storage.files import append_durably
from vime.errors import SettingsError


class KillRecord(msgspec.Struct, frozen=True):
    """One line: a kill, or with number -1 a session that went on to the run's end."""

    number: int
    kill: str
    killed: bool
    how: str
    stuck: bool
    orphans: list[str]
    seconds: dict[str, float]


class _Head(msgspec.Struct, frozen=True):
    """The first line: what a kill's number means."""

    seed: int
    real_engine: bool


class CampaignLog:
    """Lines of JSON. A torn last line, of an invocation that was interrupted, is left out."""

    def __init__(self, path: Path, *, seed: int, real_engine: bool) -> None:
        """Open or begin it; refuses the log of another seed or engine."""
        self._path = path
        head = _Head(seed, real_engine)
        if not path.exists():
            append_durably(path, msgspec.json.encode(head))
        found = msgspec.json.decode(path.read_bytes().split(b"\n")[0], type=_Head)
        if found != head:
            raise SettingsError(f"{path} is of {found}, asked: {head}.", next_step="Give another --folder.")

    def append(self, record: KillRecord) -> None:
        append_durably(self._path, msgspec.json.encode(record))

    def records(self) -> list[KillRecord]:
        """Those of all invocations, oldest first."""
        found = []
        for line in self._path.read_bytes().split(b"\n")[1:]:
            try:
                found.append(msgspec.json.decode(line, type=KillRecord))
            except msgspec.DecodeError:
                continue
        return found

    def done(self) -> set[int]:
        """Numbers of the kills that were made."""
        return {record.number for record in self.records() if record.killed or record.stuck}
