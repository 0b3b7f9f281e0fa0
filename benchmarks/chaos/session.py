"""Sessions of the job under fire: started, killed as planned, and seen to their ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.kills import Kill, Layout, Victim
from benchmarks.chaos.launch import launch
from benchmarks.chaos.processes import MarkedProcesses, kill_all
from benchmarks.chaos.standing import Driver, Standing
from benchmarks.chaos.step_log import StepLog
from storage.files import write_atomically
from tests.end_to_end.jobs import Job
from vime.utils.kill_points import KILL_FILE_VARIABLE

FLAGS: dict[str, Any] = {
    "--save-interval": 2,
    "--rollout-queue-lease-seconds": 6,
    "--update-weight-timeout": 60,
    "--rollout-batch-size": 4,
    "--n-samples-per-prompt": 2,
    "--rollout-cleanup-timeout": 5,
    "--max-process-restarts": 1000,
    "--parity-probes": 0,
}
"""Small batches, commits that are soon due, leases that soon end. No trainer agrees with a stand-in."""
SESSION = "chaos"
SURVIVING_STEPS = 3
"""After which a session is taken to have survived a kill. Two batches may have waited; the third is made after it."""
POLL_S = 0.05
SCAN_S = 0.25
"""Between two looks at all processes of the machine."""


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    start: float = 400.0
    """Until the first step of a session."""
    survive: float = 240.0
    """Until a session goes on after a kill, or has ended by itself."""
    stop: float = 120.0
    orphan: float = 30.0
    """What a process may outlive its session's driver."""


@dataclass(frozen=True)
class Outcome:
    """What came of one kill, or of the last session."""

    killed: bool
    """False when the session ended before the kill's moment came."""
    how: str
    """In words: how the session went on or ended."""
    stuck: bool = False
    """It neither went on nor ended in time, or ended for no reason."""
    orphans: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: stop (the session before), start, wait (for the moment), settle, leave (its processes)."""


class Stopwatch:
    """Sums seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def ended(self, name: str) -> None:
        """Put the time since the last call on this account."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._since, 2)
        self._since = now


@dataclass(frozen=True)
class _Session:
    process: Driver
    log: Path
    layout: Layout
    steps_at_start: int
    keeps_engines: bool
    """Whether they outlive it, for the next one."""

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def __str__(self) -> str:
        return f"{self.layout}, {self.log.name}"


class Campaign:
    """One run folder that session after session is started in; a session takes kills for as long as it survives."""

    def __init__(self, folder: Path, *, standin: bool, forks: bool = False, patience: Patience = Patience()) -> None:
        """With `forks` sessions come from a fork server and join a cluster that stands, but those started anew."""
        self._forks = forks
        self._standing: Standing | None = None
        self.folder, self._standin, self._patience = folder, standin, patience
        self.job = Job(folder, flags=FLAGS, switches=("--use-fault-tolerance",))
        self._processes = MarkedProcesses(str(folder.resolve()))
        self._kill_file = folder / "kill"
        self._variables = {KILL_FILE_VARIABLE: str(self._kill_file.resolve())}
        self._steps = StepLog(self.job.run)
        self._session: _Session | None = None
        self._before_last = Outcome(False, "")

    def prepare(self) -> None:
        """Model and prompts, once; ends what an interrupted campaign has left running."""
        self._processes.end()
        if not (self.folder / "prompts.jsonl").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.job.prepare()

    def close(self) -> None:
        """End what still runs."""
        self._disarm()
        self._processes.end()
        if self._session is not None:
            self._session.process.wait(self._patience.stop)
            self._session = None
        if self._standing is not None:
            self._standing.close()
            self._standing = None

    def run(self, kill: Kill, num_rollout: int) -> Outcome:
        """Kill as planned, in the session that runs or in a new one, and wait for what comes of it."""
        watch = Stopwatch()
        told: list[str] = []
        orphans: list[str] = []
        stuck = False
        if self._session is not None and (kill.new_session or self._session.is_over()):
            stopped = self._stop(watch)
            stuck, orphans = stopped.stuck, stopped.orphans
            told.append(f"{stopped.how}; then ")
        is_new = self._session is None
        session = self._session or self._start(kill.layout, num_rollout, anew=kill.anew)
        killed = self._kill(kill, session, watch)
        if not killed:
            how, unexpected = "ended before its moment", is_new or not session.is_over()
        else:
            how, unexpected = self._aftermath(session)
            watch.ended("settle")
        if session.is_over() or unexpected:
            how += f", status {session.process.poll()}"
            orphans += self._leave(session, watch)
        told.append(f"{how} ({session})")
        return Outcome(killed, "".join(told), stuck or unexpected, orphans, watch.seconds)

    def finish(self, num_rollout: int, layout: Layout) -> Outcome:
        """A session without a kill, to the run's end."""
        self.settle_down()
        before, watch = self._before_last, Stopwatch()
        session = self._start(layout, num_rollout, anew=False)
        ended = _wait(session.is_over, self._patience.start + 20.0 * num_rollout)
        watch.ended("finish")
        status = session.process.poll()
        orphans = [*before.orphans, *self._leave(session, watch)]
        stuck = before.stuck or not ended or status != 0
        return Outcome(False, f"status {status} ({session})", stuck, orphans, watch.seconds)

    def settle_down(self) -> None:
        """Have the session that runs stop in order, if one does."""
        if self._session is not None:
            self._before_last = self._stop(Stopwatch())

    def num_steps(self) -> int:
        """Steps of all sessions so far."""
        return self._steps.count()

    def last_rollout(self) -> int:
        """The highest rollout that was ever trained; -1 before the first."""
        self._steps.count()
        return self._steps.last_rollout

    def _start(self, layout: Layout, num_rollout: int, *, anew: bool) -> _Session:
        keeps = not self._standin and not anew
        flags = {
            **self.job.flags,
            "--rollout-session-id": SESSION if keeps else None,
            "--actor-num-gpus-per-node": layout.num_trainers,
            "--rollout-num-gpus": layout.num_engines,
            "--rollout-num-producers": layout.num_producers,
        }
        job = replace(self.job, num_rollout=num_rollout, flags=flags)
        logs = self.folder / "sessions"
        logs.mkdir(exist_ok=True)
        log = logs / f"{len(list(logs.iterdir())):04d}.log"
        self._disarm()
        standing = self._stands() if self._forks and not anew else None
        process = launch(job, log, self._processes.mark, standin=self._standin, standing=standing, **self._variables)
        self._session = _Session(process, log, layout, self.num_steps(), keeps)
        return self._session

    def _stands(self) -> Standing:
        if self._standing is None:
            self._standing = Standing(self._processes.mark, **self._variables)
            self._standing.exempt(self._processes)
        return self._standing

    def _kill(self, kill: Kill, session: _Session, watch: Stopwatch) -> bool:
        """Wait for the moment and kill; False when the session ended before, or no step came."""
        if not kill.from_start:
            started = _wait(
                lambda: session.is_over() or self.num_steps() > session.steps_at_start, self._patience.start
            )
            watch.ended("start")
            wanted = self.num_steps() + kill.steps_before
            came = _wait(lambda: session.is_over() or self.num_steps() >= wanted, self._patience.survive)
            if not (started and came) or session.is_over():
                return False
        self._processes.alive()  # whoever is there is known from now on
        done = self._kill_at_point(kill, session) if kill.point is not None else self._kill_victim(kill, session)
        watch.ended("wait")
        return done

    def _kill_at_point(self, kill: Kill, session: _Session) -> bool:
        assert kill.point is not None
        write_atomically(self._kill_file, kill.point.value.encode())
        taken = self._kill_file.with_suffix(".taken")
        _wait(lambda: session.is_over() or taken.exists(), self._patience.survive)
        done = taken.exists()
        self._disarm()
        return done

    def _kill_victim(self, kill: Kill, session: _Session) -> bool:
        _wait(session.is_over, kill.delay_s)
        if session.is_over():
            return False
        if kill.victim is Victim.DRIVER or kill.victim is None:
            session.process.kill()
            return True
        deadline = time.monotonic() + self._patience.survive
        while time.monotonic() < deadline and not session.is_over():
            found = self._processes.of_role(kill.victim)
            chosen = found if kill.victim is Victim.TREE else found[int(kill.draw * len(found)) :][:1]
            if kill_all(chosen):
                return True
            time.sleep(SCAN_S)  # one that was killed before may not be back yet
        return False

    def _aftermath(self, session: _Session) -> tuple[str, bool]:
        """How the session went on, in words; and whether it got stuck."""
        steps = self.num_steps()
        if not _wait(lambda: session.is_over() or self.num_steps() >= steps + SURVIVING_STEPS, self._patience.survive):
            return f"no step and no end in {self._patience.survive:g} s", True
        return ("ended" if session.is_over() else "went on"), False

    def _stop(self, watch: Stopwatch) -> Outcome:
        """Have the session that runs stop in order, unless it has ended since the last kill."""
        session = self._session
        assert session is not None
        if session.is_over():
            how, stuck = "the session before had ended of its last kill", False
        else:
            os.killpg(session.process.pid, signal.SIGINT)
            stuck = not _wait(session.is_over, self._patience.stop)
            how = f"stopped with status {session.process.poll()}"
        watch.ended("stop")
        orphans = self._leave(session, watch)
        return Outcome(False, how, stuck, orphans)

    def _leave(self, session: _Session, watch: Stopwatch) -> list[str]:
        """Processes of the session that are still there some time after its driver's end; they are ended."""
        over = session.is_over()
        keeps = session.keeps_engines and over and session.process.poll() != 0  # at the run's end no engine stays
        alive, end = self._processes.alive, self._processes.end
        if keeps:
            alive, end = self._processes.besides_kept, self._processes.end_besides_kept
        if over:
            _wait(lambda: not alive(), self._patience.orphan, SCAN_S)
        left = end()
        session.process.wait(self._patience.stop)
        self._session = None
        watch.ended("leave")
        return left if over else []  # of a stuck session everything is left

    def _disarm(self) -> None:
        for path in (self._kill_file, self._kill_file.with_suffix(".taken")):
            path.unlink(missing_ok=True)


def _wait(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
