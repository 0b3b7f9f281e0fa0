"""Payloads over NIXL: Ray's tensor transport, which reads a producer's memory directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch

from pipeline.transports.ray_parts import FETCH_S

MIN_TENSOR_BYTES = 4096
"""What is shorter goes through Ray's object store: registering memory costs more than it saves."""


class NixlCarrier:
    """A `PartCarrier` over Ray's tensor transport.

    A part is a uint8 tensor on the CPU that stays in its producer's memory; a reader's agent fetches it from there.
    """

    def put(self, part: bytes) -> Any:
        if len(part) < MIN_TENSOR_BYTES:
            return ray.put(part)
        return ray.put(torch.frombuffer(bytearray(part), dtype=torch.uint8), _tensor_transport="nixl")

    def get(self, references: Sequence[Any]) -> list[bytes]:
        return [
            part if isinstance(part, bytes) else part.numpy().tobytes()
            for part in ray.get(list(references), timeout=FETCH_S)
        ]
