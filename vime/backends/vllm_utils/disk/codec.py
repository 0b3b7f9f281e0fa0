"""How the bytes of a tensor that have changed are stored. Pure functions on byte arrays.

`xor` holds old XOR new, as long as the tensor; applying it twice undoes it. `overwrite` holds a count (u4), that many
positions (u4 each, rising) and then the new bytes there, little-endian; applying it twice changes nothing more. Either
is compressed as one zstd frame of level 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vime.errors import PublicationError

Bytes = npt.NDArray[np.uint8]
Encoding = Literal["xor", "overwrite"]

COMPRESSION = "zstd"
_LEVEL = 1
_MAX_POSITION = 1 << 32


def encode_change(difference: Bytes, new: Bytes, encoding: Encoding) -> bytes:
    """The compressed entry of one tensor; `difference` is old XOR new, of equal length as `new`.

    Raises `PublicationError` for a tensor of 4 GiB or more with `overwrite`, whose positions have 32 bits.
    """
    if encoding == "xor":
        return _compress(difference.tobytes())
    if new.size >= _MAX_POSITION:
        raise PublicationError(
            f"A tensor has {new.size} bytes, allowed with the encoding overwrite: fewer than {_MAX_POSITION}.",
            next_step="Give --update-weight-delta-encoding xor.",
        )
    positions = np.flatnonzero(difference).astype("<u4")
    count = np.array([positions.size], "<u4")
    return _compress(count.tobytes() + positions.tobytes() + new[positions].tobytes())


def apply_change(entry: bytes, state: Bytes, encoding: Encoding) -> None:
    """Change `state` in place as `entry` says; `PublicationError`, before anything is changed, when it doesn't fit."""
    content = _decompress(entry, most=max(state.size, 4 + 5 * state.size))
    if encoding == "xor":
        if content.size != state.size:
            raise PublicationError(f"A change is {content.size} bytes long, its tensor {state.size}.")
        np.bitwise_xor(state, content, out=state)
        return
    count = int(content[:4].view("<u4")[0]) if content.size >= 4 else -1
    if content.size != 4 + 5 * count:
        raise PublicationError(f"A change of {count} bytes is {content.size} bytes long, expected {4 + 5 * count}.")
    positions = content[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= state.size:
        raise PublicationError(f"A change reaches byte {int(positions.max())}, its tensor has {state.size}.")
    state[positions] = content[4 + 4 * count :]


def _compress(content: bytes) -> bytes:
    compressed: bytes = pa.Codec(COMPRESSION, compression_level=_LEVEL).compress(content, asbytes=True)
    return compressed


def _decompress(entry: bytes, most: int) -> Bytes:
    """The content of a frame, of at most `most` bytes."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(entry), COMPRESSION) as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise PublicationError(f"A change can't be decompressed: {error}.") from error
    if len(content) > most:
        raise PublicationError(f"A change decompresses to more than {most} bytes.")
    return np.frombuffer(content, np.uint8)
