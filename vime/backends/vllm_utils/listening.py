"""Ports to listen on, and whether a server answers."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

from vime.errors import EngineStartError

_POLL_S = 0.25
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Servers are called directly, whatever http_proxy says."""


def claim_port(host: str, port: int, timeout_s: float = 0.0) -> int:
    """The port once it is free, or a free one for 0; raises `EngineStartError` when it isn't within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _free_port(host, port)
        except EngineStartError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with status 200 within 5 s."""
    try:
        with _WITHOUT_PROXY.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineStartError(
                f"A server can't listen on {host}:{port}: {error.strerror}.",
                next_step="Stop the program that uses this port, or name another one.",
            ) from error
        return int(probe.getsockname()[1])
