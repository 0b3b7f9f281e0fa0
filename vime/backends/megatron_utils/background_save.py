"""Writing a checkpoint in the background: what it holds is copied to host memory, and a thread writes the copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

Bucket = tuple[Any, str, tuple[list[Any], list[Any]]]
"""What goes into one file: path, its name in the checkpoint, and the serialised objects and tensors."""


class BackgroundSave:
    """The parts of one checkpoint on this rank: an actor's, and where there are any a critic's and a reference's.

    `add` and `finish` are collective over all ranks and belong on the thread that trains; `start` and `wait` are the
    rank's own. Needs host memory for a copy of all that this rank writes.
    """

    def __init__(self) -> None:
        self._parts: list[AsyncRequest] = []
        self._last: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, part: AsyncRequest) -> None:
        """Take over a save that has been planned; the model may change as soon as this returns."""
        if part.async_fn is not None:
            rank, buckets, results = part.async_fn_args
            part = part._replace(async_fn_args=(rank, _copied(buckets), results), preload_fn=None)
        self._parts.append(part)

    def then(self, act: Callable[[], None]) -> None:
        """Have rank 0 call `act` when all ranks have written all parts."""
        self._last.append(act)

    def start(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Write this rank's files in a thread, which calls `before` and `after` around that."""

        def write() -> None:
            try:
                before()
                for part in self._parts:
                    if part.async_fn is not None:
                        part.async_fn(*part.async_fn_args, **part.async_fn_kwargs)
                after()
            except BaseException as error:  # handed to `wait`, which raises it on the caller's thread
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when this rank's files are written and synced; raises what stopped the thread."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Make the parts whole, when all ranks have written theirs.

        Raises `CheckpointException` on all ranks when one couldn't write a file.
        """
        self.wait()
        for part in self._parts:
            for finalize in part.finalize_fns:
                finalize()
        if dist.get_rank() == 0:
            for act in self._last:
                act()
        dist.barrier()


def _copied(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same with tensors in host memory that nobody else holds; objects are serialised already."""
    return [
        (path, name, (objects, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in buckets
    ]
