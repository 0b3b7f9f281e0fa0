"""A router whose port another program takes between its choice and the router's start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vime.backends.vllm_utils import router_server
from vime.backends.vllm_utils.listening import answers, claim_port
from vime.backends.vllm_utils.router_server import NUM_PORT_TRIES, RouterLaunch, RouterServer
from vime.errors import EngineStartError

pytestmark = pytest.mark.multiproc


@pytest.fixture
def launch(tmp_path: Path) -> RouterLaunch:
    return RouterLaunch("127.0.0.1", 0, tmp_path / "router.log")


def lose(count: int, monkeypatch: pytest.MonkeyPatch, taken: int) -> list[int]:
    """The first `count` ports for metrics are one that is taken; all ports that are claimed."""
    claimed: list[int] = []

    def claim(host: str, port: int, timeout_s: float = 0.0) -> int:
        is_lost = len(claimed) % 2 == 1 and len(claimed) < 2 * count
        claimed.append(taken if is_lost else claim_port(host, port, timeout_s))
        return claimed[-1]

    monkeypatch.setattr(router_server, "claim_port", claim)
    return claimed


def test_a_router_that_loses_a_port_starts_at_others(launch: RouterLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        claimed = lose(1, monkeypatch, other.getsockname()[1])
        server = RouterServer(launch)
    assert len(claimed) == 4
    host, port = server.address
    assert answers(f"http://{host}:{port}/liveness")
    server.stop()


def test_a_router_that_loses_its_ports_again_and_again_shows_why(
    launch: RouterLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        claimed = lose(NUM_PORT_TRIES, monkeypatch, other.getsockname()[1])
        with pytest.raises(EngineStartError, match="Address already in use"):
            RouterServer(launch)
    assert len(claimed) == 2 * NUM_PORT_TRIES
