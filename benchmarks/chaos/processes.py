"""The processes of a job under fire, found by what they inherit and by their titles; nothing is asked of the job."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

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


@dataclass(frozen=True)
class MarkedProcesses:
    """All processes that inherited one mark, but this one."""

    mark: str

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK_VARIABLE) == self.mark
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def of_role(self, victim: Victim) -> list[psutil.Process]:
        """Those that may be killed as this victim, but the driver, whose process its parent knows."""
        alive = self.alive()
        if victim is Victim.TREE:
            return alive
        return [process for process in alive if any(part in title_of(process) for part in TITLES[victim])]

    def end(self) -> list[str]:
        """Kill all; their ids and titles."""
        found = self.alive()
        told = [f"{process.pid} {title_of(process)}" for process in found]
        kill_all(found)
        psutil.wait_procs(found, timeout=10.0)
        return told


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
