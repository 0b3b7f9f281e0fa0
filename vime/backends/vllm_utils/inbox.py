"""Engine side of every staged publication: weights gathered and verified while the engine samples on.

It knows nothing of vLLM. Staging runs on a thread of its own and touches no model, so whatever fails here leaves the
engine as it was.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from vime.backends.vllm_utils.disk.mirror import HostMirror
from vime.backends.vllm_utils.receiving import GroupInit, NamedTensors, WeightReceiver
from vime.backends.vllm_utils.updates import (
    FromFolder,
    FromGroup,
    FromMirror,
    FromShared,
    StageRequest,
    StageState,
    StageStatus,
)
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder
from vime.errors import PublicationError, VimeError

_Result = TypeVar("_Result")
_Load = Callable[[], None]


class PartsInSharedMemory(Protocol):
    """Buffers of trainers on this machine; see `vime.backends.vllm_utils.gpu_share.SharedBuffers`."""

    def part(self, update: FromShared, device: torch.device) -> NamedTensors:
        """A copy of one part, verified."""
        ...


@dataclass(frozen=True)
class Staged:
    """A version beside the model: its tensors in memory, or how to read them."""

    tensors: NamedTensors | None = None
    read: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
    load: _Load | None = None
    """Puts the tensors into the model, where everything for that was arranged beforehand."""
    is_whole: bool = True

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.read() if self.tensors is None else self.tensors)


class WeightInbox:
    """Holds at most one staged version. Its methods return at once, except `receiver`."""

    def __init__(
        self,
        worker_rank: int,
        device: torch.device | None = None,
        *,
        shared: PartsInSharedMemory | None = None,
        arrange: Callable[[NamedTensors], _Load | None] = lambda _: None,
    ) -> None:
        """`worker_rank` counts the workers of this engine from 0; `device` is its GPU, if it has one.

        `arrange`, called with all tensors of a version that is in memory, may give a way to load them at once.
        """
        self._worker_rank, self._device = worker_rank, device
        self._shared, self._arrange = shared, arrange
        self._joining: _Task[WeightReceiver] | None = None
        self._staging: _Task[Staged] | None = None
        self._version = 0
        self._parts: NamedTensors = []

    def join(self, init: GroupInit) -> None:
        """Begin to join a sender's group, after leaving an earlier one."""
        self.leave()
        self._joining = _Task(lambda: WeightReceiver(init, self._worker_rank, self._device))

    def leave(self) -> None:
        """Leave the sender's group."""
        if self._joining is not None:
            self._joining.when_done(lambda receiver: receiver.close())
        self._joining = None

    def receiver(self) -> WeightReceiver:
        """The place in the sender's group, once joined; raises `PublicationError` when there is none."""
        if self._joining is None:
            raise PublicationError("The engine has not joined a weight sender.", next_step="Initialise the transfer.")
        return self._joining.result()

    def stage(self, request: StageRequest) -> None:
        """Begin to stage a version; one that was staged or is being staged is given up."""
        self._version = request.version
        self._staging = _Task(lambda: self._gather(request))

    def status(self) -> StageStatus:
        """How far the newest staging is; version 0 when nothing was staged yet."""
        if self._staging is None:
            return StageStatus(self._version, "failed", "nothing was staged")
        return StageStatus(self._version, *self._staging.outcome())

    def take(self, version: int) -> Staged:
        """A staged version, which is staged no longer.

        Raises `PublicationError` when another version or none is staged, when its staging failed or isn't done.
        """
        status = self.status()
        if self._staging is None or status.version != version or status.state != "staged":
            found = f"{status.state} ({status.reason})" if status.reason else status.state
            raise PublicationError(
                f"Version {version} can't be loaded: the engine's staging of version {status.version} is {found}.",
                next_step="Stage the version first.",
            )
        staged = self._staging.result()
        if not staged.is_whole:
            raise PublicationError(f"Version {version} can't be loaded: parts of it have not come.")
        self._staging = None
        return staged

    def clear(self) -> None:
        """Keep nothing of a version that is not loaded from here: its memory is needed for one that comes otherwise."""
        self._staging, self._parts = None, []

    def _gather(self, request: StageRequest) -> Staged:
        match request:
            case FromGroup():
                return self._in_memory(self.receiver().receive())
            case FromFolder():
                return _from_folder(request)
            case FromMirror():
                return _from_mirror(request)
            case FromShared():
                return self._next_part(request)

    def _in_memory(self, tensors: NamedTensors) -> Staged:
        return Staged(tensors, load=self._arrange(tensors))

    def _next_part(self, request: FromShared) -> Staged:
        if self._shared is None or self._device is None:
            raise PublicationError("This engine has no GPU whose memory it could share.")
        tensors = self._shared.part(request, self._device)
        self._parts = tensors if request.first else self._parts + tensors
        if not request.last:
            return Staged(is_whole=False)
        tensors, self._parts = self._parts, []
        return self._in_memory(tensors)


def _from_folder(request: FromFolder) -> Staged:
    folder = Path(request.path)
    _call_hook(request.pre_read_hook, folder.parent, request.version)
    return _verified(folder, request.names, request.digest)


def _from_mirror(request: FromMirror) -> Staged:
    source = Path(request.source)
    _call_hook(request.pre_read_hook, source, request.version)
    folder = HostMirror(Path(request.mirror), lock_timeout_s=request.lock_timeout_s).pull(source, request.version)
    return _verified(folder, request.names, request.digest)


def _verified(folder: Path, names: list[str], digest: str) -> Staged:
    verify_weight_folder(folder, names, digest)
    return Staged(read=lambda: read_weight_folder(folder, names))


def _call_hook(path: str | None, source_dir: Path, target_version: int) -> None:
    if path is None:
        return
    module, _, name = path.rpartition(".")
    try:
        hook = getattr(importlib.import_module(module), name)
        hook(str(source_dir), target_version)
    except Exception as error:  # the boundary to code of the user
        raise PublicationError(
            f"The hook {path} failed before reading {source_dir}: {type(error).__name__}: {error}.",
            next_step="Correct the function named by --vllm-custom-pull-weights-pre-read-hook.",
        ) from error


class _Task(Generic[_Result]):
    """Work on a thread of its own, which doesn't keep the process alive."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._future: Future[_Result] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def result(self) -> _Result:
        """Wait for the work; raises what it raised."""
        return self._future.result()

    def outcome(self) -> tuple[StageState, str]:
        """State now, and the reason of a failure."""
        if not self._future.done():
            return "running", ""
        error = self._future.exception()
        if error is None:
            return "staged", ""
        return "failed", error.message if isinstance(error, VimeError) else f"{type(error).__name__}: {error}"

    def when_done(self, use: Callable[[_Result], None]) -> None:
        """Call `use` with the result, as soon as there is one."""
        self._future.add_done_callback(lambda done: None if done.exception() else use(done.result()))

    def _run(self, work: Callable[[], _Result]) -> None:
        try:
            self._future.set_result(work())
        except Exception as error:  # the boundary of the thread: whoever asks for the result gets it
            _clear_frames(error)
            self._future.set_exception(error)


def _clear_frames(error: BaseException | None) -> None:
    """The error is kept, and would keep what its frames hold: tensors, where there may be no memory for others."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
