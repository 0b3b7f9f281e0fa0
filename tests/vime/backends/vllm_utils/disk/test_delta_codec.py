"""Changed bytes as entries of a delta."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.backends.vllm_utils.disk.checksum import checksum
from vime.backends.vllm_utils.disk.codec import Encoding, apply_change, encode_change
from vime.errors import PublicationError

ENCODINGS: list[Encoding] = ["xor", "overwrite"]


def entry(old: np.ndarray, new: np.ndarray, encoding: Encoding) -> bytes:
    return encode_change(old ^ new, new, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(st.binary(max_size=300), st.data())
def test_any_change_turns_the_old_bytes_into_the_new(encoding: Encoding, old: bytes, data: st.DataObject) -> None:
    state = np.frombuffer(old, np.uint8).copy()
    new = np.frombuffer(data.draw(st.binary(min_size=len(old), max_size=len(old))), np.uint8)
    apply_change(entry(state, new, encoding), state, encoding)
    assert state.tobytes() == new.tobytes()


def test_overwriting_twice_changes_nothing_more_and_xor_twice_undoes_it() -> None:
    old, new = np.arange(100, dtype=np.uint8), np.arange(100, 200, dtype=np.uint8)
    results = {}
    for encoding in ENCODINGS:
        state = old.copy()
        for _ in range(2):
            apply_change(entry(old, new, encoding), state, encoding)
        results[encoding] = state
    assert (results["overwrite"] == new).all()
    assert (results["xor"] == old).all()


def test_overwrite_holds_a_count_positions_and_new_bytes() -> None:
    import pyarrow as pa

    old = np.zeros(300, np.uint8)
    new = old.copy()
    new[[2, 258]] = [7, 9]
    content = pa.CompressedInputStream(pa.BufferReader(entry(old, new, "overwrite")), "zstd").read()
    assert content == b"\x02\0\0\0" + b"\x02\0\0\0" + b"\x02\x01\0\0" + b"\x07\x09"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_entry_of_another_tensor_is_refused_and_nothing_changes(encoding: Encoding) -> None:
    long, short = np.full(64, 3, np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(PublicationError, match=r"its tensor|decompresses to more"):
        apply_change(entry(np.zeros(64, np.uint8), long, encoding), short, encoding)
    assert not short.any()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("damage", [slice(None, -3), slice(3, None), slice(0, 0)])
def test_a_damaged_entry_is_refused_and_nothing_changes(encoding: Encoding, damage: slice) -> None:
    state, new = np.zeros(1000, np.uint8), np.arange(1000).astype(np.uint8)
    with pytest.raises(PublicationError):
        apply_change(entry(state, new, encoding)[damage], state, encoding)
    assert not state.any()


def test_an_entry_that_unpacks_to_far_more_than_its_tensor_is_refused() -> None:
    huge = np.zeros(1 << 20, np.uint8)
    with pytest.raises(PublicationError, match="decompresses to more than 24 bytes"):
        apply_change(entry(huge, huge, "xor"), np.zeros(4, np.uint8), "overwrite")


def test_checksums_are_those_of_their_algorithms() -> None:
    data = np.frombuffer(b"abc", np.uint8)
    assert checksum(data, "xxh3-128") == "06b05ab6733a618578af5f94892f3950"
    assert checksum(data, "blake3") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert checksum(data, "adler32") == "024d0127"
    with pytest.raises(PublicationError, match=r"'md5' is not known, allowed: xxh3-128, blake3, adler32"):
        checksum(data, "md5")
