"""vime's weight-transfer engine in a vLLM worker: load a verified set of weights, or leave the model alone.

A version is staged first (`vime.backends.vllm_utils.inbox`): received, verified, and not yet in the model, while the
engine samples on. A damaged, reordered, missing or repeated tensor is refused there, and the engine goes on under its
old version. Only then, with the engine paused, is the version loaded. What can't be staged, because the weights don't
fit a second time into memory, is loaded part by part as it arrives, each part verified before.

Failures after the first weight was touched are: a set that is whole by its digest but doesn't fill the model, an error
in the model's own loading code, and a stream that ends early. The engine then holds a mix and must be fenced until a
later update succeeds, which replaces everything. In all cases the version number stays, because
`finish_weight_update`, which raises it, refuses unless a version was loaded.

The first version that lies whole in memory is loaded by vLLM, and the load recorded (`copy_plan`). Where it proves to
be copies, later versions are loaded by these alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime.backends.vllm_utils.gpu_share import SharedBuffers
from vime.backends.vllm_utils.inbox import WeightInbox
from vime.backends.vllm_utils.plugin.copy_plan import CopyPlan, NotCopies, plan_of
from vime.backends.vllm_utils.plugin.copy_recorder import CopyRecorder
from vime.backends.vllm_utils.plugin.copy_time import CopyTime
from vime.backends.vllm_utils.plugin.expert_prepack import ExpertPrepack
from vime.backends.vllm_utils.plugin.held_weights import HeldWeights
from vime.backends.vllm_utils.plugin.layerwise_load import LayerwiseLoad
from vime.backends.vllm_utils.plugin.tied_heads import TiedHeads
from vime.backends.vllm_utils.receiving import NamedTensors, parse_group_init
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

logger = logging.getLogger(__name__)


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
        self._plan: CopyPlan | None = None
        self._may_plan = True
        self.copy_time = CopyTime(device)
        self._vllm_config = vllm_config
        parallel = vllm_config.parallel_config
        self._has_other_workers = parallel.world_size > 1
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.inbox = WeightInbox(
            worker_rank, device if device.type == "cuda" else None, shared=self._shared, arrange=self._arranged
        )

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
                self._load_staged(version)
            case LoadStream():
                self.inbox.clear()
                self._load(self.inbox.receiver().stream())
            case LoadShared():
                self.inbox.clear()
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

    def swap(self, version: int) -> None:
        """Load a staged version between two steps, in the order of the steps on the model's stream.

        Errors as of `receive_weights`.
        """
        self._loaded = False
        with set_current_vllm_config(self._vllm_config):
            was_planned = self._load_staged(version)
        if self.device.type == "cuda" and (self._has_other_workers or not was_planned):
            torch.cuda.synchronize(self.device)
        self._loaded = False

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        """vLLM 0.26 wants this of every engine; `vime.backends.vllm_utils.sender.WeightSender` sends instead."""
        raise PublicationError("vime's weights are sent by WeightSender.")

    def shutdown(self) -> None:
        """Leave the sender's group."""
        self.inbox.leave()

    def _arranged(self, tensors: NamedTensors) -> Callable[[], None] | None:
        """Runs on the thread that has staged the tensors."""
        arranged = None if self._plan is None else self._plan.arrange(tensors)
        return None if arranged is None else lambda: self.copy_time.around(arranged.run, tensors)

    def _load_staged(self, version: int) -> bool:
        """Load a version that lies beside the model; whether by copies alone."""
        staged = self.inbox.take(version)
        if staged.load is not None:
            self._abandon()
            staged.load()
            self._loaded = True
            return True
        self.copy_time.forget()
        if staged.tensors is None or not self._may_plan:
            self._load([staged])
        else:
            self._load_and_plan(staged.tensors)
        return False

    def _load_and_plan(self, tensors: NamedTensors) -> None:
        """Load by vLLM, and find out whether copies do the same."""
        recorder = CopyRecorder(tensors)
        with recorder:
            self._load([tensors])
        try:
            self._plan = plan_of(self.model, tensors, recorder)
        except (NotCopies, RuntimeError) as reason:  # torch's own: for want of memory, say
            self._plan, self._may_plan = None, False
            logger.warning("Every version is loaded by vLLM, tensor by tensor, since %s.", reason)
        else:
            logger.info("Later versions are loaded by %d copies.", self._plan.num_copies)

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
