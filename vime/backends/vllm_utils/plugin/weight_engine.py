"""vime's weight-transfer engine in a vLLM worker: load a verified set of weights, or leave the model alone.

The order in one update is: receive everything into host memory (or read the folder), verify it, load it, check that
the model is complete. So a damaged, reordered, missing or repeated tensor is refused while the model still holds the
old weights, and the engine may go on serving under the old version. Only two failures come after the first weight was
touched: a set that is whole by its digest but doesn't fill the model, and an error in the model's own loading code.
The engine then holds a mix and must be fenced until a later update succeeds, which replaces everything. In all cases
the version number stays, because `finish_weight_update`, which raises it, refuses unless an update was verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vime.backends.vllm_utils.plugin.coverage import abandon_reload, incomplete_layers
from vime.backends.vllm_utils.plugin.expert_prepack import ExpertPrepack
from vime.backends.vllm_utils.plugin.tied_heads import TiedHeads
from vime.backends.vllm_utils.receiving import GlooReceiver, parse_gloo_init
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder
from vime.errors import PublicationError


@dataclass
class VimeInit(WeightTransferInitInfo):  # type: ignore[misc]
    """`GlooSender.init_info`, to join a sender. Not needed for updates from a folder."""

    gloo: dict[str, Any]


@dataclass
class VimeUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One publication: over gloo without `path`, from a folder with it.

    Names and digest of the sender's receipt are required for a folder; over gloo they travel with the weights and may
    be announced beforehand.
    """

    path: str | None = None
    names: list[str] | None = None
    digest: str | None = None


class VimeWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """One per worker."""

    init_info_cls = VimeInit
    update_info_cls = VimeUpdate

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._expert_prepack = ExpertPrepack(model)
        self._tied_heads = TiedHeads(model)
        self._receiver: GlooReceiver | None = None
        self._verified = False

    def init_transfer_engine(self, init_info: VimeInit) -> None:
        """Join a sender's group, after leaving an earlier one."""
        self.shutdown()
        parallel = self.vllm_config.parallel_config
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = GlooReceiver(parse_gloo_init(init_info.gloo), worker_rank)

    def start_weight_update(self) -> None:
        """Open an update; the model is not touched before the weights are verified."""
        self._verified = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one publication."""
        self._verified = False
        self.receive_weights(self.parse_update_info(update_info))
        self._verified = True

    def receive_weights(self, update_info: VimeUpdate) -> None:
        """See the module's text for what the model holds after a failure."""
        if update_info.path is not None:
            if update_info.names is None or update_info.digest is None:
                raise PublicationError("An update from a folder needs the names and the digest of its receipt.")
            folder = Path(update_info.path)
            verify_weight_folder(folder, update_info.names, update_info.digest)
            self._load(read_weight_folder(folder, update_info.names))
        elif self._receiver is not None:
            self._load(self._receiver.receive(update_info.names, update_info.digest))
        else:
            raise PublicationError("The engine has not joined a weight sender.", next_step="Initialise the transfer.")

    def finish_weight_update(self) -> None:
        """Close the update; raises `PublicationError`, so that no version is raised, if nothing was verified."""
        if not self._verified:
            raise PublicationError("No verified weights have arrived in this update; the version stays.")
        self._verified = False

    def shutdown(self) -> None:
        """Leave the sender's group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._expert_prepack.begin_reload()
        initialize_layerwise_reload(self.model)
        complete = False
        try:
            self.model.load_weights(iter(tensors))
            missing = incomplete_layers(self.model, self._tied_heads.names)
            if missing:
                raise PublicationError(
                    f"The weights don't fill {len(missing)} layers of the model, first {', '.join(missing[:3])}.",
                    next_step="Fence the engine and publish every tensor of the checkpoint.",
                )
            complete = True
        finally:
            if not complete:
                abandon_reload(self.model)
            finalize_layerwise_reload(self.model, self.model_config)
        self._tied_heads.refresh()
        self._expert_prepack.repair()
