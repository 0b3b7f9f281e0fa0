"""How long copies take on a GPU that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vime.backends.vllm_utils.receiving import NamedTensors


class CopyTime:
    """Time of the newest copies on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[Any, Any] | None = None

    def around(self, copies: Callable[[], None], sources: NamedTensors) -> None:
        """Start the copies, which read `sources`; these may be freed as soon as it returns."""
        self.forget()
        if self._device.type != "cuda":
            copies()
            return
        stream = torch.cuda.current_stream(self._device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(stream)
        copies()
        end.record(stream)
        storages = {tensor.untyped_storage().data_ptr(): tensor for _, tensor in sources if tensor.is_cuda}
        for tensor in storages.values():
            tensor.record_stream(stream)  # it was allocated on the stream of the thread that has staged it
        self._events = (begin, end)

    def forget(self) -> None:
        """What is loaded now is waited for."""
        self._events = None

    def seconds(self) -> float | None:
        """Of the copies, once they have ended; None before. 0 where they were waited for."""
        if self._events is None:
            return 0.0
        begin, end = self._events
        return float(begin.elapsed_time(end)) / 1000 if end.query() else None
