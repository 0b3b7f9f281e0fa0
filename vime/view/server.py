"""Serves the pages of runs on this machine."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from werkzeug.serving import BaseWSGIServer, make_server

from recovery.run_location import RunLocation
from vime.errors import SettingsError
from vime.outputs import passing_folder
from vime.view.app import make_app
from vime.view.run_watch import RunWatch

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@contextmanager
def watching(locations: Sequence[RunLocation]) -> Iterator[list[RunWatch]]:
    """Watches over runs, the first being the one that is shown. Their indexes are gone at the end.

    Raises `StorageError` where there is no place for these.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(passing_folder("vime-view-"))
        yield [
            stack.enter_context(RunWatch(location, name, folder))
            for name, location in zip(_names(locations), locations, strict=True)
        ]


def serve(locations: Sequence[RunLocation], host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` gets the address. Port 0 takes a free one.

    Raises `SettingsError` when the address can't be listened on.
    """
    with watching(locations) as watches:
        server = viewer_server(watches, host, port)
        try:
            announce(f"http://{f'[{host}]' if ':' in host else host}:{server.port}/")
            server.serve_forever()
        finally:
            server.server_close()


def viewer_server(watches: Sequence[RunWatch], host: str, port: int) -> BaseWSGIServer:
    """A server that listens already. Raises `SettingsError` when it can't."""
    app = make_app(watches)
    if host in LOOPBACK:
        # A page of another site that makes its name point here must not read the run.
        app.server.config["TRUSTED_HOSTS"] = list(LOOPBACK)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        return make_server(host, port, app.server, threaded=True)
    except OSError as error:
        raise SettingsError(
            f"{host}:{port} can't be listened on: {error.strerror}.", next_step="Give another --host or --port."
        ) from error


def _names(locations: Sequence[RunLocation]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    for length in range(1, 100):
        names = ["/".join(location.root.parts[-length:]) for location in locations]
        if len(set(names)) == len(names):
            return names
    raise SettingsError("The same run is given twice.", next_step="Name each run once.")
