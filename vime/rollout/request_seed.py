"""Seeds of single requests: a generation that is repeated draws the same random numbers."""

from __future__ import annotations

import hashlib

_BYTES = 6
"""JSON numbers of this size are exact everywhere."""


def request_seed(run_seed: int, *parts: int | str) -> int:
    """A seed in [0, 2^48) that depends on the run's seed and on what the request is for, and on nothing else."""
    text = "\n".join(map(str, (run_seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_BYTES).digest(), "big")
