"""Engine side of every staged publication: weights gathered and verified while the engine samples on.

It knows nothing of vLLM. Staging runs on a thread of its own and touches no model, so whatever fails here leaves the
engine as it was.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

import torch

from vime.backends.vllm_utils.disk.mirror import HostMirror
from vime.backends.vllm_utils.receiving import GroupInit, NamedTensors, WeightReceiver
from vime.backends.vllm_utils.updates import FromFolder, FromGroup, FromMirror, StageRequest, StageState, StageStatus
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder
from vime.errors import PublicationError, VimeError

_Result = TypeVar("_Result")
_Read = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class WeightInbox:
    """Holds at most one staged version. Its methods return at once, except `receiver` and `take`."""

    def __init__(self, worker_rank: int, device: torch.device | None = None) -> None:
        """`worker_rank` counts the workers of this engine from 0; `device` is its GPU, if it has one."""
        self._worker_rank, self._device = worker_rank, device
        self._joining: _Task[WeightReceiver] | None = None
        self._staging: _Task[_Read] | None = None
        self._version = 0

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

    def take(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a staged version, which is staged no longer.

        Raises `PublicationError` when another version or none is staged, when its staging failed or isn't done.
        """
        status = self.status()
        if self._staging is None or status.version != version or status.state != "staged":
            found = f"{status.state} ({status.reason})" if status.reason else status.state
            raise PublicationError(
                f"Version {version} can't be loaded: the engine's staging of version {status.version} is {found}.",
                next_step="Stage the version first.",
            )
        read = self._staging.result()
        self._staging = None
        return iter(read())

    def _gather(self, request: StageRequest) -> _Read:
        if isinstance(request, FromGroup):
            tensors: NamedTensors = self.receiver().receive()
            return lambda: tensors
        return _from_folder(request) if isinstance(request, FromFolder) else _from_mirror(request)


def _from_folder(request: FromFolder) -> _Read:
    folder = Path(request.path)
    _call_hook(request.pre_read_hook, folder.parent, request.version)
    return _verified(folder, request.names, request.digest)


def _from_mirror(request: FromMirror) -> _Read:
    source = Path(request.source)
    _call_hook(request.pre_read_hook, source, request.version)
    folder = HostMirror(Path(request.mirror), lock_timeout_s=request.lock_timeout_s).pull(source, request.version)
    return _verified(folder, request.names, request.digest)


def _verified(folder: Path, names: list[str], digest: str) -> _Read:
    verify_weight_folder(folder, names, digest)
    return lambda: read_weight_folder(folder, names)


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
            self._future.set_exception(error)
