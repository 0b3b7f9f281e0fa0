"""Requests to engines through a router."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import between
from vime.settings.flag import flag


@dataclass(frozen=True)
class ModelRouter:
    """Where the router of one served model listens."""

    model: str
    host: str
    port: int


@dataclass(frozen=True)
class RouterSettings:
    """Requests to engines through a router. `--router-*` flags go to vllm-router."""

    vllm_router_ip: str | None = flag(None, "Host of a router that runs already; vime then starts none.")
    vllm_router_port: int | None = flag(
        None,
        "Port of the router; without --vllm-router-ip that of the one that vime starts.",
        check=between(1, 65535),
    )
