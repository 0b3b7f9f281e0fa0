"""`incidents.jsonl`: engines that get no requests, and how a session failed, for whoever looks into the run folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from storage.files import append_durably
from vime.errors import StorageError, VimeError

logger = logging.getLogger(__name__)

Kind = Literal["session", "engine", "ended"]


class Incident(msgspec.Struct, frozen=True):
    """One line. A `session` that begins ends all before it, and an `engine` without text serves again."""

    time_s: float
    """Unix time."""
    kind: Kind
    subject: str = ""
    """Address of the engine."""
    text: str = ""
    what_to_do: str = ""


def open_incidents(incidents: Iterable[Incident]) -> list[Incident]:
    """Those that are not over, in the order of their beginning; `incidents` are ascending in time."""
    found: dict[tuple[str, str], Incident] = {}
    for incident in incidents:
        key = (incident.kind, incident.subject)
        if incident.kind == "session":
            found.clear()
        elif incident.text:
            found[key] = incident
        else:
            found.pop(key, None)
    return list(found.values())


class IncidentLog:
    """Appends what happens in one session. Where a line can't be written the run goes on, and its log says so."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix time."""
        self._path, self._clock = path, clock
        self._fenced: dict[str, dict[str, str]] = {}
        """Model -> its engines that get no requests -> why."""

    def begin(self) -> None:
        """What earlier sessions left is over."""
        if self._path.exists():
            self._append("session")

    def engines(self, model: str, fenced: Mapping[str, str], names: Mapping[str, str]) -> None:
        """Note which engines of a model get no requests (address -> why).

        `names` maps address -> name of vime's own engines.
        """
        before = self._fenced.get(model, {})
        for address in before.keys() - fenced.keys():
            self._append("engine", address)
        for address, why in fenced.items():
            if before.get(address) != why:
                name = names.get(address, "")
                self._append("engine", address, *_engine_words(address, why, name))
        self._fenced[model] = dict(fenced)

    def ended(self, error: VimeError) -> None:
        """Note what ended the session."""
        self._append("ended", "", error.message, error.next_step)

    def _append(self, kind: Kind, subject: str = "", text: str = "", what_to_do: str = "") -> None:
        incident = Incident(self._clock(), kind, subject, text, what_to_do)
        try:
            append_durably(self._path, msgspec.json.encode(incident))
        except StorageError as error:
            logger.warning("an incident was not kept: %s", error)


@contextmanager
def session_incidents(path: Path) -> Iterator[IncidentLog]:
    """The log of a session, which also gets the `VimeError` that ends it."""
    log = IncidentLog(path)
    log.begin()
    try:
        yield log
    except VimeError as error:
        log.ended(error)
        raise


def _engine_words(address: str, why: str, name: str) -> Sequence[str]:
    shown = f"{name} ({address})" if name else f"The engine at {address}"
    log = f"Its log is logs/{name.replace(' ', '_')}.log in the run folder. " if name else ""
    return (
        f"{shown[0].upper()}{shown[1:]} gets no requests: {why}",
        f"{log}The others go on; an engine that missed a version is given the next one, and with --use-fault-tolerance "
        "one that died is replaced.",
    )
