"""Where the queue tests put their pools: the local disk, or, when the environment names them, a mount and its peer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from storage.pool import Pool

DECLARATION = "VIME_TEST_DECLARATION"
"""Names the declaration of the JuiceFS mount that the tests' folders lie on."""
MOUNT, PEER = "VIME_TEST_MOUNT", "VIME_TEST_PEER"
"""Mount points of two clients of one volume: of the tests' folders, and of whoever publishes payloads."""


def create_pool(root: Path, run_id: str, **options: Any) -> Pool:
    """A new pool, with the profile of the file system that it lies on."""
    path = os.environ.get(DECLARATION)
    if path is not None:
        options |= {"profile": "juicefs", "declaration": json.loads(Path(path).read_text())}
    return Pool.create(root, run_id, **options)


def root_at_peer(root: Path) -> Path | None:
    """The same pool through the other client; None when there is only one, or the pool lies elsewhere."""
    peer = os.environ.get(PEER)
    if peer is None or not root.is_relative_to(os.environ[MOUNT]):
        return None
    return Path(peer) / root.relative_to(os.environ[MOUNT])
