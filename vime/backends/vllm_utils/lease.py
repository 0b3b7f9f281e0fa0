"""Files through which an engine outlives its driver, and ends by itself when no other driver comes.

In the folder of a run's kept engines each engine has a claim (who it is, where it listens, what it was started from)
and a process file (who supervises it, how it ended), and all have one lease, which a living driver renews. An engine
runs while its claim names it and the lease was renewed within the time that the lease itself states. Times are measured
by each process for itself, from the moments at which it sees the lease change: clocks are never compared.

It imports the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vime.backends.vllm_utils.supervisor import start_time, unlink_listed

OUTLIVES_DRIVER_ENV = "VIME_ENGINE_OUTLIVES_DRIVER"
"""In the environment of each process of an engine that is kept."""
LEASE = "lease.json"
FIRST_KEEP_S = 600.0
"""How long an engine that has never read its lease waits for it."""
KILL_MARGIN_S = 10.0
"""What a supervisor may take beyond the time that its engine has to end in order."""
_CLAIM, _PROCESS = ".claim.json", ".process.json"
_POLL_S = 0.05


@dataclass(frozen=True)
class Claim:
    """Which process may be a run's engine of that name.

    `place` names the machine and its process table, `settings` what the engine was started from, name by name.
    """

    id: str
    host: str
    port: int
    place: str
    grace_s: float
    ledger: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class KeptProcess:
    """The supervisor of a kept engine. `status` is the engine's once it has ended."""

    id: str
    pid: int
    began: str | None
    status: int | None = None

    @property
    def runs(self) -> bool:
        """Whether it does, here."""
        return self.began is not None and start_time(self.pid) == self.began


def here() -> str:
    """Name of this machine's process table since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def outlives_driver(pid: int) -> bool:
    """Whether a process is of an engine that is kept."""
    with suppress(OSError):
        return f"{OUTLIVES_DRIVER_ENV}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def claim_path(folder: Path, name: str) -> Path:
    """Where the claim of an engine lies."""
    return folder / f"{name}{_CLAIM}"


def read_claim(path: Path) -> Claim | None:
    """None without one, or with one that can't be read."""
    with suppress(OSError, ValueError, TypeError):
        return Claim(**json.loads(path.read_text()))
    return None


def read_process(claim: Path, claim_id: str) -> KeptProcess | None:
    """The process that was started for a claim; None without one."""
    with suppress(OSError, ValueError, TypeError):
        found = KeptProcess(**json.loads(_process_path(claim).read_text()))
        return found if found.id == claim_id else None
    return None


def write_process(claim: Path, process: KeptProcess) -> None:
    """Note who supervises the engine of a claim."""
    replace_text(_process_path(claim), json.dumps(asdict(process)))


def write_claim(path: Path, claim: Claim) -> None:
    """From now on only the engine with this id may be it."""
    replace_text(path, json.dumps(asdict(claim), indent=1))


def remove_claim(path: Path) -> None:
    """From now on no engine may be it; a running one ends within a second or two."""
    path.unlink(missing_ok=True)
    _process_path(path).unlink(missing_ok=True)


def write_lease(folder: Path, beat: str, keep_s: float) -> None:
    """Say that a driver lives; `beat` differs from every one before."""
    replace_text(folder / LEASE, json.dumps({"beat": beat, "keep_s": keep_s}))


def claims(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name of each engine that has a claim, and where it lies."""
    for path in sorted(folder.glob(f"*{_CLAIM}")):
        yield path.name.removesuffix(_CLAIM), path


def end_claimed(path: Path) -> None:
    """Remove a claim; return when its engine has ended, if it is one of this machine."""
    claim = read_claim(path)
    process = None if claim is None else read_process(path, claim.id)
    if claim is not None and claim.place == here():
        if process is not None:
            _end(process, claim.grace_s)
        unlink_listed(Path(claim.ledger))  # a supervisor that was killed has left it
    remove_claim(path)


class LeaseWatch:
    """A kept engine's view of its claim and its lease."""

    def __init__(self, claim: Path, claim_id: str, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is this process's clock, in seconds."""
        self._claim, self._id, self._now = claim, claim_id, now
        self._beat, self._keep_s, self._changed_at = "", FIRST_KEEP_S, now()

    def why_end(self) -> str | None:
        """Why the engine must end; None while it may go on.

        A claim that is gone counts at once; one that can't be read says nothing.
        """
        try:
            if json.loads(self._claim.read_text())["id"] != self._id:
                return "another engine takes its place"
        except FileNotFoundError:
            return "its claim was removed"
        except (OSError, ValueError):
            pass
        with suppress(OSError, ValueError, KeyError):
            lease = json.loads((self._claim.parent / LEASE).read_text())
            if lease["beat"] != self._beat:
                self._beat, self._keep_s, self._changed_at = lease["beat"], float(lease["keep_s"]), self._now()
        if self._now() - self._changed_at > self._keep_s:
            return f"no driver has renewed its lease for {self._keep_s:g} s"
        return None


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content, so that a reader finds the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _process_path(claim: Path) -> Path:
    return claim.with_name(claim.name.removesuffix(_CLAIM) + _PROCESS)


def _end(process: KeptProcess, grace_s: float) -> None:
    """End a supervisor and its engine, if it runs."""
    for number, within_s in ((signal.SIGTERM, grace_s + KILL_MARGIN_S), (signal.SIGKILL, KILL_MARGIN_S)):
        if process.runs:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)  # when the supervisor is killed, the kernel ends its engine's processes
            _wait_for_end(process, within_s)


def _wait_for_end(process: KeptProcess, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while process.runs and time.monotonic() < deadline:
        time.sleep(_POLL_S)
