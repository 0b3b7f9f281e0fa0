"""Which carrier moves the samples of a transport in memory."""

from __future__ import annotations

from pipeline.transports.ray_parts import ObjectStoreCarrier, PartCarrier


def carrier_of(transport: str) -> PartCarrier:
    """The carrier of `--rollout-data-transport`."""
    if transport == "nixl":
        from pipeline.transports.nixl import NixlCarrier  # needs torch

        return NixlCarrier()
    return ObjectStoreCarrier()
