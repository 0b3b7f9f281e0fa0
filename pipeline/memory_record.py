"""--memory-recorder: what a trainer rank allocates, from before its model is built, in a file for the tool's viewer."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from storage.files import make_folder
from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import records_memory

MAX_EVENTS = 1_000_000
"""Allocations and frees of CUDA memory that are remembered; the oldest are forgotten first."""


class Recording(Protocol):
    """A recorder at work."""

    def end(self) -> None:
        """Write what was recorded; nothing is recorded after that."""


class MemoryRecord:
    """Ends a recording after so many rollout batches, at the latest when it is closed."""

    def __init__(self, recording: Recording, num_batches: int | None) -> None:
        self._recording: Recording | None = recording
        self._batches_left = num_batches

    def batch_trained(self) -> None:
        """Call it after each rollout batch."""
        if self._batches_left is not None:
            self._batches_left -= 1
            if self._batches_left == 0:
                self.close()

    def close(self) -> None:
        """End the recording, unless it has ended."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.end()


def memory_record(settings: Settings, rank: int, clock: Callable[[], float] = time.time) -> MemoryRecord | None:
    """Begin to record as the settings ask for; None where they don't.

    Raises `SettingsError` where memory can't be recorded: without memray, or without a GPU for torch's recorder.
    """
    if not records_memory(settings):
        return None
    debug = settings.debug
    folder = Path(debug.memory_snapshot_dir).absolute()
    make_folder(folder)
    name = f"memory_rank_{rank}_{clock():.0f}"
    recording: Recording
    if debug.memory_recorder == "memray":
        recording = _MemrayRecording(folder / f"{name}.bin")
    else:
        recording = _CudaRecording(folder / f"{name}.pickle")
    return MemoryRecord(recording, debug.memory_snapshot_num_steps)


class _MemrayRecording:
    """Allocations in host memory, of all threads; `memray flamegraph FILE` shows them."""

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("memray") is None:
            raise SettingsError(
                "--memory-recorder memray: the package memray isn't installed.",
                next_step="Install it into the environment that vime runs in: pip install memray.",
            )
        import memray

        self._tracker = memray.Tracker(path)
        self._tracker.__enter__()

    def end(self) -> None:
        self._tracker.__exit__(None, None, None)


class _CudaRecording:
    """Allocations of CUDA memory; https://pytorch.org/memory_viz shows them."""

    def __init__(self, path: Path) -> None:
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(
                "--memory-recorder torch records memory of CUDA, which this rank has none of, allowed: memray.",
                next_step="Give --memory-recorder memray, which records memory of the host.",
            )
        self._path = path
        self._memory: Any = torch.cuda.memory
        self._memory._record_memory_history(max_entries=MAX_EVENTS)

    def end(self) -> None:
        self._memory._dump_snapshot(str(self._path))
        self._memory._record_memory_history(enabled=None)
