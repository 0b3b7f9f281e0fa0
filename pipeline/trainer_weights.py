"""One trainer rank's part in publications: gathers the weights, and sends, writes or shares them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pipeline.held_weights import HeldWeights, weights_to_send
from pipeline.weight_transports.disk import PublishedVersion
from vime.backends.vllm_utils.disk.layout import highest_version, version_folder
from vime.backends.vllm_utils.disk.writer import VersionWriter
from vime.backends.vllm_utils.gpu_share import SharingBuffer
from vime.backends.vllm_utils.packets import collect_packets
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.transfer_group import GroupBackend
from vime.errors import PublicationError, TrainerError

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class NamedWeights(Protocol):
    """What is needed of a trainer."""

    def named_hf_weights(self) -> NamedTensors:
        """Collective: every rank iterates to the end, and rank 0 gets the tensors."""
        ...


@dataclass(frozen=True)
class PublishSettings:
    """How one rank publishes."""

    backend: GroupBackend = "gloo"
    buffer_bytes: int = 512 << 20
    """Weights that are sent, or shared, at once."""
    disk_dir: Path | None = None
    post_write_hook: str | None = None


class TrainerWeights:
    """Rank-local; all ranks are told the same things in the same order, but for what is said to be of rank 0."""

    def __init__(
        self,
        trainer: NamedWeights,
        rank: int,
        settings: PublishSettings,
        *,
        make_writer: Callable[[Path], VersionWriter] = VersionWriter,
        hook_args: object = None,
    ) -> None:
        """`make_writer` makes the writer of versions on disk; `hook_args` is what the user's hook gets as `args`."""
        self._trainer, self._rank, self._settings, self._hook_args = trainer, rank, settings, hook_args
        self._sender: WeightSender | None = None
        self._writer = None if settings.disk_dir is None else make_writer(settings.disk_dir)
        self._buffer: SharingBuffer | None = None
        self._num_bytes = 0
        """Of the weights, once a version was sent, written or shared."""
        self.held = HeldWeights(rank)
        self._parts: Iterator[dict[str, object]] | None = None

    def can_hold(self) -> bool:
        """Whether this rank, the first, has room for a copy of the weights; their size is known after a version."""
        return self._num_bytes > 0 and self.held.fits(self._num_bytes)

    def hold(self) -> bool:
        """Publish the weights of this moment from now on, until `let_go`. All ranks together.

        False where this rank's memory was too little after all: it then publishes the trainer's weights.
        """
        return self.held.hold(self._trainer.named_hf_weights())

    def let_go(self) -> None:
        """Publish the trainer's present weights again."""
        self.held.let_go()

    def open_sender(self, address: str, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        """Listen for the engines (rank 0), after closing an earlier group; what each needs to join."""
        self._close_sender()
        self._sender = WeightSender(
            address,
            0,
            1 + len(engine_names),
            engine_names=engine_names,
            timeout_s=timeout_s,
            packet_bytes=self._settings.buffer_bytes,
            backend=self._settings.backend,
        )
        return [self._sender.init_info(rank_offset) for rank_offset in range(1, 1 + len(engine_names))]

    def connect_sender(self) -> None:
        """Wait until the engines have joined (rank 0)."""
        self._opened_sender().connect()

    def send(self) -> int:
        """Send the current weights to the engines; bytes sent."""
        weights = self._weights()
        try:
            if self._rank == 0:
                self._num_bytes = self._opened_sender().send(weights).num_bytes
            return self._num_bytes
        finally:
            _exhaust(weights)  # ranks gather together, to the end

    def highest_version(self) -> int:
        """Highest version that has a folder in the shared folder; 0 without one."""
        return 0 if self._settings.disk_dir is None else highest_version(self._settings.disk_dir)

    def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        """Write the current weights as a version on disk; rank 0 writes, and tells of it."""
        weights = self._weights()
        folder = version_folder(self._disk_dir, version)
        if self._rank != 0 or self._writer is None:
            _exhaust(weights)
            return PublishedVersion(str(folder), [], "", 0, 0, 0)
        try:
            written = self._writer.write(version, weights, full=full)
        finally:
            _exhaust(weights)  # ranks gather together, to the end
        receipt = written.receipt
        self._num_bytes = receipt.num_bytes
        return PublishedVersion(
            str(folder), receipt.names, receipt.digest, receipt.num_bytes, written.wire_bytes, written.changed_bytes
        )

    def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        """Call the user's `f(args, version_dir, engines)`, if there is one; `PublicationError` when it fails."""
        path = self._settings.post_write_hook
        if path is None:
            return
        module, _, name = path.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)(self._hook_args, folder, engine_names)
        except Exception as error:  # the boundary to code of the user
            raise PublicationError(
                f"The hook {path} failed on trainer rank {self._rank} after {folder} was written: "
                f"{type(error).__name__}: {error}.",
                next_step="Correct the function named by --custom-update-weight-post-write-path.",
            ) from error

    def remove_version(self, version: int) -> None:
        """Delete a version's folder (rank 0)."""
        if self._writer is not None:
            self._writer.remove(version)

    def share_next_part(self, version: int) -> dict[str, object] | None:
        """Put the next part of the weights into the shared buffer (rank 0, while the others `follow_sharing`)."""
        if self._parts is None:
            self._parts = self._shared_parts(version)
        part = next(self._parts, None)
        if part is None:
            self._parts = None
        return part

    def follow_sharing(self) -> None:
        """Take part in the gathering of weights that rank 0 shares."""
        _exhaust(self._weights())

    def stop_sharing(self) -> None:
        """Gather the rest of a version for nothing, so that the other ranks come to its end (rank 0).

        The next version gets a buffer of its own: a new process can't always open what another one has had open.
        """
        if self._parts is not None:
            for _ in self._parts:
                pass
        self._parts = self._buffer = None

    def close(self) -> None:
        """Leave the group."""
        self._close_sender()

    def _shared_parts(self, version: int) -> Iterator[dict[str, object]]:
        if self._buffer is None:
            device = torch.device("cuda", torch.cuda.current_device())
            # The description of a part comes on top of its tensors.
            self._buffer = SharingBuffer(self._settings.buffer_bytes * 9 // 8, device)
        pending: list[tuple[str, torch.Tensor]] | None = None
        first, num_bytes = True, 0
        for tensors in collect_packets(self._weights(), self._settings.buffer_bytes):
            if pending is not None:
                yield self._buffer.fill(version, pending, first=first, last=False)
                first = False
            pending = [(name, tensor.clone()) for name, tensor in tensors]
            num_bytes += sum(tensor.nbytes for _, tensor in pending)
        self._num_bytes = num_bytes
        if pending is not None:
            yield self._buffer.fill(version, pending, first=first, last=True)

    def _weights(self) -> NamedTensors:
        return weights_to_send(self.held, self._trainer.named_hf_weights)

    @property
    def _disk_dir(self) -> Path:
        if self._settings.disk_dir is None:
            raise TrainerError(
                f"rank {self._rank}: no folder for versions is set.", next_step="Set the disk transport."
            )
        return self._settings.disk_dir

    def _opened_sender(self) -> WeightSender:
        if self._sender is None:
            raise TrainerError(f"rank {self._rank}: no engine is connected.", next_step="Call open_sender first.")
        return self._sender

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _exhaust(weights: NamedTensors) -> None:
    for _ in weights:
        pass
