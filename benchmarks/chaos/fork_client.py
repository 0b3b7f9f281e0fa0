"""Has the fork server start a worker of Ray, in the place of Ray's own script that would start an interpreter for it.

Ray runs it as `python fork_client.py ... default_worker.py ...`. It imports the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET_VARIABLE = "VIME_CHAOS_FORK_SERVER"
"""Path of the server's socket."""
LENGTH_BYTES = 8


def send_request(connection: socket.socket, request: dict[str, object], output: int, errors: int) -> None:
    """Send what is to be started, and the file descriptors that it writes to."""
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(LENGTH_BYTES, "big")], [output, errors])
    connection.sendall(content)


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SOCKET_VARIABLE])
    request = {"worker": sys.argv[1:], "environment": dict(os.environ), "folder": str(os.getcwd())}
    send_request(connection, request, 1, 2)
    connection.recv(LENGTH_BYTES)  # it has been started


if __name__ == "__main__":
    main()
