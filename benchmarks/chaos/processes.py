"""The processes of a job under fire, found by what they inherit and by their titles; nothing is asked of the job."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping

import psutil

from benchmarks.chaos.kills import Victim

MARK_VARIABLE = "VIME_CHAOS_CAMPAIGN"
"""Every process of a campaign inherits it, so that one which outlives its session is found."""
TITLES: dict[Victim, tuple[str, ...]] = {
    Victim.PRODUCER: ("ray::ProducerActor",),
    Victim.TRAINER: ("ray::TrainerActor",),
    Victim.COORDINATOR: ("ray::CoordinatorActor",),
    Victim.ENGINE: ("ray::EngineActor", "ray::StandinEngineActor", "vllm.entrypoints", "VLLM::EngineCore"),
    Victim.ROUTER: ("vllm::router",),
}
"""What the title of a process of a role contains."""
KEPT_TITLE = "vime.backends.vllm_utils.kept_supervisor"
"""Of the process at the top of an engine that may outlive its session."""


class MarkedProcesses:
    """All processes that inherited one mark and those below them, but this one.

    Some programs overwrite their environment with their title. They are known by whom they came from, also when that
    one has ended, if they were there at an earlier look.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._known: set[psutil.Process] = set()
        self._cluster: int | None = None
        self._server: int | None = None

    def leave_out(self, *, cluster: int, server: int) -> None:
        """These two aren't looked for, nor what is below the first; what the second has forked is."""
        self._cluster, self._server = cluster, server

    def alive(self) -> list[psutil.Process]:
        """Look at all processes of the machine."""
        children: dict[int, list[psutil.Process]] = defaultdict(list)
        found = set(self._known)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                children[process.ppid()].append(process)
                if process.environ().get(MARK_VARIABLE) == self.mark and process.pid != os.getpid():
                    found.add(process)
        if self._cluster is not None and self._server is not None:
            found |= set(children[self._server])
            left_out = {process.pid for process in _below(children, children[self._cluster])}
            found = {process for process in found if process.pid not in {self._cluster, self._server, *left_out}}
        found = _below(children, found)
        self._known = {process for process in found if _runs(process)}
        return sorted(self._known, key=lambda process: process.pid)

    def besides_kept(self) -> list[psutil.Process]:
        """All but engines that may outlive their session."""
        alive, children = self.alive(), defaultdict(list)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                children[process.ppid()].append(process)
        kept = _below(children, [process for process in alive if KEPT_TITLE in title_of(process)])
        return [process for process in alive if process not in kept]

    def of_role(self, victim: Victim) -> list[psutil.Process]:
        """Those that may be killed as this victim, but the driver, whose process its parent knows."""
        alive = self.alive()
        if victim is Victim.TREE:
            return alive
        return [process for process in alive if any(part in title_of(process) for part in TITLES[victim])]

    def end(self) -> list[str]:
        """Kill all; their ids and titles."""
        return self._ended(self.alive())

    def end_besides_kept(self) -> list[str]:
        """The same of all but engines that may outlive their session."""
        return self._ended(self.besides_kept())

    @staticmethod
    def _ended(found: list[psutil.Process]) -> list[str]:
        told = [f"{process.pid} {title_of(process)}" for process in found]
        kill_all(found)
        psutil.wait_procs(found, timeout=10.0)
        return told


def _below(children: Mapping[int, list[psutil.Process]], processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """These and all that came from them."""
    found = set(processes)
    unseen = list(found)
    while unseen:
        below = set(children.get(unseen.pop().pid, ())) - found
        found |= below
        unseen += below
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title_of(process: psutil.Process) -> str:
    """The beginning of its command line, which some programs set themselves."""
    try:
        return " ".join(process.cmdline()[:4])
    except psutil.Error:
        return "(ended)"


def kill_all(processes: list[psutil.Process]) -> int:
    """Kill them by SIGKILL; how many there still were."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed
