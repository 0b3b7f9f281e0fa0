"""vime's weight-transfer engine in a vLLM worker: load a verified set of weights, or leave the model alone.

A version is staged first (`vime.backends.vllm_utils.inbox`): received, verified, and not yet in the model, while the
engine samples on. A damaged, reordered, missing or repeated tensor is refused there, and the engine goes on under its
old version. Only then, with the engine paused, is the version loaded. What can't be staged, because the weights don't
fit a second time into memory, is loaded part by part as it arrives, each part verified before.

Failures after the first weight was touched are: a set that is whole by its digest but doesn't fill the model, an error
in the model's own loading code, and a stream that ends early. The engine then holds a mix and must be fenced until a
later update succeeds, which replaces everything. In all cases the version number stays, because
`finish_weight_update`, which raises it, refuses unless a version was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime.backends.vllm_utils.gpu_share import SharedBuffers
from vime.backends.vllm_utils.inbox import WeightInbox
from vime.backends.vllm_utils.plugin.expert_prepack import ExpertPrepack
from vime.backends.vllm_utils.plugin.held_weights import HeldWeights
from vime.backends.vllm_utils.plugin.layerwise_load import LayerwiseLoad
from vime.backends.vllm_utils.plugin.tied_heads import TiedHeads
from vime.backends.vllm_utils.receiving import parse_group_init
from vime.backends.vllm_utils.updates import (
    CompareHeld,
    LoadShared,
    LoadStaged,
    LoadStream,
    RememberHeld,
    parse_stage_request,
    parse_update,
)
from vime.errors import PublicationError


@dataclass
class VimeInit(WeightTransferInitInfo):  # type: ignore[misc]
    """`WeightSender.init_info`, to join a sender. Not needed for versions on disk."""

    group: dict[str, Any]


@dataclass
class VimeUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One of `vime.backends.vllm_utils.updates.Update`, as it came."""

    content: dict[str, Any] = field(default_factory=dict)


class VimeWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """One per worker."""

    init_info_cls = VimeInit
    update_info_cls = VimeUpdate

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._expert_prepack = ExpertPrepack(model)
        self._tied_heads = TiedHeads(model)
        self._held = HeldWeights(model)
        self._shared = SharedBuffers()
        self._loading: LayerwiseLoad | None = None
        self._loaded = False
        parallel = vllm_config.parallel_config
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.inbox = WeightInbox(worker_rank, device if device.type == "cuda" else None)

    def init_transfer_engine(self, init_info: VimeInit) -> None:
        """Begin to join a sender's group, after leaving an earlier one; the sender knows when it stands."""
        self.inbox.join(parse_group_init(init_info.group))

    def stage(self, request: dict[str, Any]) -> None:
        """Begin to stage a version; see `WeightInbox.stage`."""
        self.inbox.stage(parse_stage_request(request))

    def start_weight_update(self) -> None:
        """Open an update; the model is not touched before there are verified weights."""
        self._loaded = False
        self._abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version, or one part of it."""
        self._loaded = False
        self.receive_weights(VimeUpdate(update_info))

    def receive_weights(self, update_info: VimeUpdate) -> None:
        """See the module's text for what the model holds after a failure."""
        update = parse_update(update_info.content)
        match update:
            case LoadStaged(version):
                self._load([self.inbox.take(version)])
            case LoadStream():
                self._load(self.inbox.receiver().stream())
            case LoadShared():
                self._load_shared(update)
            case RememberHeld():
                self._held.remember()
            case CompareHeld():
                self._held.compare()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Close the update; raises `PublicationError`, so that no version is raised, if nothing was loaded."""
        if not self._loaded:
            raise PublicationError("No verified weights have been loaded in this update; the version stays.")
        self._loaded = False

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        """vLLM 0.26 wants this of every engine; `vime.backends.vllm_utils.sender.WeightSender` sends instead."""
        raise PublicationError("vime's weights are sent by WeightSender.")

    def shutdown(self) -> None:
        """Leave the sender's group."""
        self.inbox.leave()

    def _load(self, parts: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._begin()
        try:
            for part in parts:
                self._load_part(part)
        except BaseException:
            self._abandon()
            raise
        self._complete()

    def _load_shared(self, update: LoadShared) -> None:
        tensors = self._shared.part(update, self.device)
        if update.first:
            self._begin()
        self._load_part(tensors)
        if update.last:
            self._complete()

    def _begin(self) -> None:
        self._abandon()
        self._expert_prepack.begin_reload()
        self._loading = LayerwiseLoad(self.model, self.model_config)

    def _load_part(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._loading is None:
            raise PublicationError("A part of a version came without its beginning.", next_step="Publish again.")
        try:
            self._loading.load(tensors)
        except BaseException:
            self._abandon()
            raise

    def _complete(self) -> None:
        loading, self._loading = self._loading, None
        assert loading is not None
        loading.finish(self._tied_heads.names)
        self._tied_heads.refresh()
        self._expert_prepack.repair()
        self._loaded = True

    def _abandon(self) -> None:
        """Give up a load that is under way; layers that were full already keep the new weights."""
        if self._loading is not None:
            self._loading.abandon()
            self._loading = None
