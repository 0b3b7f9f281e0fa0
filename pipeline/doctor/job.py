"""Checks of this machine against the settings of a job; each reads only the flags that were given."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from pipeline.doctor.check import Check, failed, passed, warned
from pipeline.doctor.machine import MachineFacts, port_error
from pipeline.kept_engines import kept_on_disk
from pipeline.model_config import model_config
from pipeline.preview.disk_need import DiskNeed, disk_need
from pipeline.preview.folders import RESERVE_STEP, reserve_shortfall, written_folders
from pipeline.preview.process_map import Machines, map_processes
from pipeline.run_folder import RunFolder
from storage.preflight import probe_folder
from vime.counted import counted
from vime.errors import VimeError
from vime.folders import existing_parent
from vime.settings.groups import Settings

GIB = 2**30


def job_checks(settings: Settings, facts: MachineFacts, *, with_devices: bool = True) -> list[Check]:
    """All checks that need settings. What a check needs and isn't given leaves the check out; `with_devices` says
    whether the flags ask for devices.
    """
    checks = [*([devices(settings, facts)] if with_devices else []), *router_port(settings)]
    need, model = _disk_need(settings)
    checks += model
    for flag, folder in written_folders(settings).items():
        parent = existing_parent(folder)
        if need is not None:
            checks.append(free_disk(flag, parent, shutil.disk_usage(parent).free, need))
        checks.append(folder_works(flag, folder, parent))
    if written_folders(settings) and settings.queue.rollout_disk_reserve_gib:
        checks.append(disk_reserve(settings))
    if settings.checkpoint.save is not None:
        checks += [leftovers(RunFolder.of(settings)), *kept_engines(RunFolder.of(settings), settings)]
    return checks


def devices(settings: Settings, facts: MachineFacts) -> Check:
    """GPUs (or worker processes) there are, against those that the run needs."""
    kind, have = ("GPU", facts.num_gpus) if facts.num_gpus else ("worker process", facts.num_slots)
    try:
        processes = map_processes(settings, Machines(have, have, kind))
    except VimeError as error:
        return failed("devices of the run", error.message, error.next_step)
    found = (
        f"{counted(processes.num_devices, kind)} needed ({counted(len(processes.trainers), 'trainer rank')}, "
        f"{counted(len(processes.engines), 'engine')}, {processes.shape}), {have} there"
    )
    if processes.num_devices > have:
        return failed("devices of the run", found, "Lower --actor-num-gpus-per-node or --rollout-num-gpus.")
    return passed("devices of the run", found)


def router_port(settings: Settings, bind: Callable[[str, int], str | None] = port_error) -> list[Check]:
    """Whether the port that the flags name is free, unless a router of others listens there."""
    port = settings.router.vllm_router_port
    if port is None or settings.router.vllm_router_ip is not None:
        return []
    error = bind("127.0.0.1", port)
    if error is None:
        return [passed("router port", f"{port} is free")]
    return [failed("router port", f"--vllm-router-port {port}: {error}.", "Stop what listens there, or change it.")]


def free_disk(flag: str, folder: Path, free: int, need: DiskNeed) -> Check:
    """Free bytes against one commit and one rollout batch (fail), and the whole run (warn)."""
    name = f"free disk for {flag}"
    found = (
        f"{free / GIB:.1f} GiB free in {folder}; one commit and one rollout batch need "
        f"{need.to_begin_bytes / GIB:.2f} GiB, the whole run up to {need.run_bytes / GIB:.2f} GiB"
    )
    if free < need.to_begin_bytes:
        return failed(name, found, f"Free space, or put {flag} on a larger disk.")
    if free < need.run_bytes:
        return warned(name, found, "Commit less often (--save-interval), or remove old commits during the run.")
    return passed(name, found)


def disk_reserve(settings: Settings) -> Check:
    """Free bytes under the queue against the reserve, below which production pauses."""
    short = reserve_shortfall(settings)
    if short is None:
        return passed("disk reserve", f"{settings.queue.rollout_disk_reserve_gib:g} GiB and more are free")
    return failed("disk reserve", f"{short}: production would pause at once.", RESERVE_STEP)


def folder_works(flag: str, folder: Path, parent: Path) -> Check:
    """Whether the file system under `folder` does what queue and commits rely on; tried in `parent`, where the run
    makes it if it does not exist.
    """
    name = f"storage of {flag}"
    if not parent.is_dir():
        return failed(name, f"{parent} is a file, not a folder.", f"Give {flag} another folder.")
    tested = str(parent) if folder.exists() else f"{folder} does not exist yet; tested its parent {parent}"
    broken = [probe for probe in probe_folder(parent) if not probe.works]
    if not broken:
        return passed(name, f"{tested}: write, fsync, flock, exclusive create and rename work")
    found = "; ".join(f"{probe.name}: {probe.found}" for probe in broken)
    return failed(name, f"{tested}: {found}.", f"Put {flag} on a file system that supports it, or correct its rights.")


def leftovers(folder: RunFolder) -> Check:
    """Processes that the previous session of this run folder started and that still run."""
    name = "leftover processes"
    try:
        recorded = msgspec.json.decode(folder.processes.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return passed(name, f"{folder.root} records no previous session")
    except (OSError, msgspec.MsgspecError) as error:
        return warned(name, f"{folder.processes} can't be read: {error}.", "Remove the file when no session runs.")
    kept = kept_on_disk(folder.kept_engines).running.values()
    started = [pid for pid in _ids(list(recorded.values())) if pid not in kept]
    alive = [pid for pid in started if _started_before(pid, folder.processes.stat().st_mtime)]
    if not alive:
        return passed(name, f"none of the processes in {folder.processes} runs")
    listed = " ".join(str(pid) for pid in alive)
    return failed(
        name, f"A session in {folder.root} still has processes: {listed}.", f"Wait for it, or stop it: kill {listed}"
    )


def kept_engines(folder: RunFolder, settings: Settings) -> list[Check]:
    """Engines that outlived their driver and wait for another one."""
    name, found = "kept engines", kept_on_disk(folder.kept_engines)
    names = [*found.running, *found.elsewhere]
    if not names:
        return []
    words = f"{', '.join(names)} of session {found.session} run without this command, or with their session."
    if found.session == settings.queue.rollout_session_id:
        return [passed(name, f"{words} A start takes them over if they were started from the same settings")]
    pids = " ".join(map(str, found.running.values()))
    return [warned(name, f"{words} A start ends them.", f"Give --rollout-session-id {found.session}, or kill {pids}.")]


def _started_before(pid: int, time_s: float) -> bool:
    """Whether this process runs and is as old as the record; a younger one has only inherited the number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= time_s + 1.0
    except psutil.Error:
        return False


def _ids(values: list[object]) -> list[int]:
    """All numbers in nested lists."""
    found: list[int] = []
    for value in values:
        if isinstance(value, list):
            found += _ids(value)
        elif isinstance(value, int):
            found.append(value)
    return found


def num_requests(settings: Settings) -> int:
    """Most requests at engines at once."""
    return settings.rollout.vllm_server_concurrency * max(settings.cluster.num_engines, 1)


def _disk_need(settings: Settings) -> tuple[DiskNeed | None, list[Check]]:
    """What the run writes, when a model is named; else a failed check that says why it can't be read."""
    if settings.checkpoint.hf_checkpoint is None:
        return None, []
    try:
        need = disk_need(settings, model_config(settings))
    except VimeError as error:
        return None, [failed("model", error.message, error.next_step or "Name another --hf-checkpoint.")]
    return need, [passed("model", f"{need.parameters / 1e6:.4g} M parameters")]
