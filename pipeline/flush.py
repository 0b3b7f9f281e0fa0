"""When a weight publication also flushes the engines' KV caches."""

from __future__ import annotations


def publication_flushes(version: int, start_version: int, interval: int) -> bool:
    """Whether publishing `version` aborts running requests and drops all KV.

    `start_version` is the version that the run started from (0 when fresh), so `start_version + 1` is the run's
    first publication, which always flushes. `interval` is `--flush-cache-interval`: 1 flushes always, N > 1 every
    N versions counted from version 1 (also after a resume), 0 or less never again.

    Raises:
        ValueError: `version` is not above `start_version`; versions never go back.
    """
    if version <= start_version:
        raise ValueError(f"version {version} is not above the version {start_version} that the run started from")
    if version == start_version + 1:
        return True
    return interval > 0 and (version - 1) % interval == 0
