"""Methods that vime adds to vLLM's workers, called through the route `/collective_rpc`."""

from __future__ import annotations

from typing import Any

import msgspec

from vime.backends.vllm_utils.plugin.weight_engine import VimeWeightEngine


class VimeWorker:
    """Mixed into the worker class by vLLM's `--worker-extension-cls`."""

    weight_transfer_engine: Any

    def vime_stage_weights(self, request: str) -> None:
        """Begin to stage a version; `request` is the JSON of a `StageRequest`. Returns at once."""
        self._vime_weight_engine().stage(msgspec.json.decode(request, type=dict[str, Any]))

    def vime_staging(self) -> dict[str, Any]:
        """Fields of the present `StageStatus`."""
        status: dict[str, Any] = msgspec.to_builtins(self._vime_weight_engine().inbox.status())
        return status

    def vime_swap_weights(self, version: int) -> None:
        """Load a staged version between two steps; see `VimeWeightEngine.swap`."""
        self._vime_weight_engine().swap(version)

    def vime_copy_seconds(self) -> float | None:
        """Time on the GPU of the newest `vime_swap_weights`; None while it may still run."""
        return self._vime_weight_engine().copy_time.seconds()

    def _vime_weight_engine(self) -> VimeWeightEngine:
        if not isinstance(self.weight_transfer_engine, VimeWeightEngine):
            raise RuntimeError("vime's weight-transfer engine is not configured")
        return self.weight_transfer_engine
