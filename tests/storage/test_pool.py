from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from straw.errors import QuotaExceeded

from storage.columns import encode_group
from storage.pool import Pool
from storage.queue import GroupQueue
from storage.refs import PoolRef
from tests.storage.queue_helpers import new_queue, samples_of
from vime.errors import CorruptDataError, StorageError

DECLARATION = {
    "direct_mount": True,
    "writeback": False,
    "open_cache": 0,
    "readdir_cache": False,
    "client_version": "1.4.2",
    "durability_description": "test",
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run") as pool:
        yield pool


def test_a_reference_crosses_processes_as_bytes(pool: Pool) -> None:
    ref = pool.publish_blob(b"plan", submission_id="1")
    data = msgspec.msgpack.encode(ref)
    with Pool.open(pool.root) as other:
        assert other.read_blob(msgspec.msgpack.decode(data, type=PoolRef)) == b"plan"


def test_many_groups_are_one_transaction_and_repeating_it_gives_the_same_references(tmp_path: Path) -> None:
    phases: list[str] = []
    pool, queue = new_queue(tmp_path / "pool", 8)
    queue.close()
    pool.close()
    pool = Pool.open(tmp_path / "pool", fault=phases.append)
    with pool, GroupQueue.open(pool, owner="x", lease_seconds=9) as queue:
        items = [(encode_group(samples_of(group.group_index)), group.lease) for group in queue.lease("w", 8)]
        phases.clear()
        refs = pool.publish_groups(items, submission_id="batch")
        assert phases.count("before_publication_open") == 1
        assert pool.publish_groups(items, submission_id="batch") == refs
        assert len(set(refs)) == 8


def test_a_pool_is_made_once_and_opened_by_its_run(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="already holds a pool \\(run id 'run'\\)"):
        Pool.create(pool.root, "run")
    with pytest.raises(StorageError, match="belongs to run 'run', not to 'other'"):
        Pool.open(pool.root, "other")
    with pytest.raises(StorageError, match="holds no pool"):
        Pool.open(tmp_path / "nowhere")


def test_the_profile_and_its_declaration_are_remembered(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="requires an explicit declaration of direct_mount=True"):
        Pool.create(tmp_path / "a", "run", profile="juicefs")
    assert not (tmp_path / "a" / "vime" / "pool.json").exists()
    Pool.create(tmp_path / "b", "run", profile="juicefs", declaration=DECLARATION).close()
    with Pool.open(tmp_path / "b") as pool:
        assert pool.profile == "juicefs"


def test_a_damaged_pool_file_is_refused(pool: Pool) -> None:
    (pool.control_dir / "pool.json").write_text("{")
    with pytest.raises(CorruptDataError, match=r"pool.json can't be read"):
        Pool.open(pool.root)


def test_a_full_disk_says_what_is_needed_and_free(tmp_path: Path) -> None:
    full = threading.Event()

    def fault(phase: str) -> None:
        if full.is_set() and phase == "after_record":
            raise QuotaExceeded("No space left on device (os error 28)")

    with Pool.create(tmp_path / "pool", "run", fault=fault) as pool:
        full.set()
        with pytest.raises(StorageError, match=r"pool: the file system is full .* 4096 bytes are needed, \d+ bytes"):
            pool.publish_blob(bytes(4096), submission_id="1")
        full.clear()
        assert pool.read_blob(pool.publish_blob(bytes(4096), submission_id="1")) == bytes(4096)


@pytest.mark.slow
def test_a_flipped_byte_is_refused_naming_the_file(pool: Pool) -> None:
    ref = pool.publish_blob(b"A" * 10000, submission_id="1")
    pack = pool.root / ref.path
    data = bytearray(pack.read_bytes())
    data[data.index(b"A" * 100) + 50] ^= 1
    pack.write_bytes(data)
    with Pool.open(pool.root) as other, pytest.raises(CorruptDataError, match=f"read {pack}: stored bytes"):
        other.read_blob(ref)
