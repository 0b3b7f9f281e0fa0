"""A reader that meets zeros where another host's data will be: it waits and reads again, or refuses; never a record."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from storage.pool import Pool
from storage.refs import PoolRef
from vime.errors import CorruptDataError, StorageError

PAYLOAD = bytes(range(1, 256)) * 40


def published(root: Path) -> tuple[PoolRef, Path]:
    """The reference of a payload, and the pack that ends with it."""
    with Pool.create(root, "run") as pool:
        ref = pool.publish_blob(PAYLOAD, submission_id="1")
        return ref, pool.root / ref.path


@pytest.mark.parametrize("num_zeros", [1, 100, 5000])
def test_zeros_at_the_end_of_a_growing_file_are_never_a_record(tmp_path: Path, num_zeros: int) -> None:
    ref, pack = published(tmp_path / "pool")
    whole = pack.read_bytes()
    end = len(whole.rstrip(b"\0"))
    pack.write_bytes(whole[: end - num_zeros] + bytes(len(whole) - end + num_zeros))
    appear = threading.Timer(0.2, pack.write_bytes, [whole])
    with Pool.open(tmp_path / "pool") as pool:
        appear.start()
        assert pool.read_blob(ref) == PAYLOAD
        appear.join()


@pytest.mark.slow  # straw waits four seconds for what might still arrive
def test_zeros_that_stay_are_refused_naming_the_file(tmp_path: Path) -> None:
    ref, pack = published(tmp_path / "pool")
    whole = pack.read_bytes()
    start = whole.index(PAYLOAD)
    pack.write_bytes(whole[: start + 50] + bytes(len(whole) - start - 50))
    with Pool.open(tmp_path / "pool") as pool, pytest.raises((CorruptDataError, StorageError), match=str(pack)):
        pool.read_blob(ref)
