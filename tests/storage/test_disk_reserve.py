"""Free space below which production pauses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.disk_reserve import GIB, DiskReserve
from vime.errors import StorageError


def space(free_blocks: int) -> os.statvfs_result:
    """A file system with blocks of 4 KiB."""
    return os.statvfs_result((4096, 4096, 10**9, free_blocks + 1000, free_blocks, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(("free_bytes", "short"), [(GIB, False), (GIB - 4096, True), (0, True)])
def test_less_than_the_reserve_is_a_shortfall(free_bytes: int, short: bool) -> None:
    reserve = DiskReserve(Path("/data"), GIB, lambda _: space(free_bytes // 4096))
    assert (reserve.shortfall() is not None) == short


def test_a_shortfall_says_what_is_needed_and_what_is_free() -> None:
    shortfall = DiskReserve(Path("/data"), 2 * GIB, lambda _: space(GIB // 2 // 4096)).shortfall()
    assert str(shortfall) == "/data: 0.50 GiB are free, 2.00 GiB are needed (--rollout-disk-reserve-gib)"


def test_no_reserve_asks_nobody(tmp_path: Path) -> None:
    assert DiskReserve(tmp_path / "missing", 0).shortfall() is None


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing: No such file or directory"):
        DiskReserve(tmp_path / "missing", 1).shortfall()
