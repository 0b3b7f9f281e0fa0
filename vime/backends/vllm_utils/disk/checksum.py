"""Checksums of a tensor's bytes, as they are written into published files."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from vime.errors import PublicationError


def _adler32(data: Any) -> str:
    return f"{zlib.adler32(data):08x}"


def _blake3(data: Any) -> str:
    return blake3(data).hexdigest()


_FUNCTIONS: dict[str, Callable[[Any], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": _blake3,
    "adler32": _adler32,
}


def checksum(data: npt.NDArray[np.uint8], kind: str) -> str:
    """Hexadecimal checksum of contiguous bytes; `PublicationError` for a kind that isn't known."""
    try:
        function = _FUNCTIONS[kind]
    except KeyError:
        raise PublicationError(f"Checksum {kind!r} is not known, allowed: {', '.join(_FUNCTIONS)}.") from None
    return function(memoryview(data))  # type: ignore[arg-type]
