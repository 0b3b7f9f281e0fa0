"""Engines that outlive their driver: the driver's side of their lease (see `vime.backends.vllm_utils.lease`)."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.run_folder import RunFolder
from vime.backends.vllm_utils.lease import (
    LEASE,
    claims,
    end_claimed,
    here,
    read_claim,
    read_process,
    write_lease,
)
from vime.counted import counted
from vime.settings.groups import Settings
from vime.settings.rules.quantities import own_engines

logger = logging.getLogger(__name__)

MAX_BEAT_S = 5.0
BEATS_PER_KEEP = 10
"""Renewals within the time that engines wait, so that one that is late costs nothing."""


@dataclass(frozen=True)
class KeptOnDisk:
    """What the folder of a run's kept engines tells."""

    running: dict[str, int]
    """Name -> process id of the supervisor, of those on this machine that run."""
    elsewhere: list[str]
    """Names of those that were started on other machines, or in other containers."""
    session: str


def engine_name(number: int) -> str:
    """Name of an engine's claim."""
    return f"engine_{number}"


def kept_on_disk(folder: Path) -> KeptOnDisk:
    """Engines that outlived their driver, or have one."""
    running, elsewhere, session = dict[str, int](), list[str](), ""
    for name, path in claims(folder):
        claim = read_claim(path)
        if claim is None:
            continue
        process = read_process(path, claim.id)
        if claim.place != here():
            elsewhere.append(name)
        elif process is not None and process.runs:
            running[name] = process.pid
        session = claim.settings.get("session id", session)
    return KeptOnDisk(running, elsewhere, session)


def end_claims(folder: Path, keep: Collection[str] = ()) -> list[str]:
    """End all kept engines but those named; names of those that were ended here.

    Returns when those of this machine have ended. Others end within seconds, when their supervisors look.
    """
    ended = [(name, path) for name, path in claims(folder) if name not in keep]
    for _, path in ended:
        end_claimed(path)
    return [name for name, _ in ended]


@contextmanager
def engine_lease(settings: Settings, folder: RunFolder, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, kept engines have a driver. At its end `note` is told of those that go on, and how long.

    Without `--rollout-session-id` there are none: those that a session before has left are ended.
    """
    queue, kept = settings.queue, folder.kept_engines
    is_keeping = queue.rollout_session_id is not None
    wanted = [engine_name(number) for number, _ in enumerate(own_engines(settings))] if is_keeping else []
    if is_keeping:
        write_lease(kept, _beat(), queue.rollout_session_timeout)
    if ended := end_claims(kept, wanted):
        note(f"Engines of a session before are not wanted any more and were ended: {', '.join(ended)}.")
    if not is_keeping:
        yield
        return
    over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(kept, queue.rollout_session_timeout, over), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        found = kept_on_disk(kept)
        if found.running or found.elsewhere:
            note(_words(found, queue.rollout_session_timeout))
        else:
            for path in (kept / LEASE, folder.router_ports):
                path.unlink(missing_ok=True)


def _renew(folder: Path, keep_s: float, over: threading.Event) -> None:
    """Until it is over. A renewal that fails is told; engines wait long enough for the next ones."""
    while not over.wait(min(MAX_BEAT_S, keep_s / BEATS_PER_KEEP)):
        try:
            write_lease(folder, _beat(), keep_s)
        except OSError as error:
            logger.warning("the lease of the kept engines was not renewed: %s", error)


def _beat() -> str:
    return f"{uuid.uuid4().hex} {time.time():.0f}"


def _words(found: KeptOnDisk, keep_s: float) -> str:
    names = ", ".join([*found.running, *found.elsewhere])
    pids = " ".join(map(str, found.running.values()))
    how = f"; to end them now: kill {pids}" if pids else ""
    number = counted(len(found.running) + len(found.elsewhere), "engine")
    return (
        f"{number} ({names}) kept for a restart with --rollout-session-id {found.session}, at most {keep_s:g} s{how}."
    )
