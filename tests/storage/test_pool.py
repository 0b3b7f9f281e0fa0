from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_helpers import new_queue, publish, samples_of
from straw.errors import QuotaExceeded

from storage.columns import EncodedGroup, decode_group, encode_group
from storage.pool import Pool
from storage.queue import GroupQueue
from storage.refs import PoolRef, ref_from_bytes, ref_to_bytes
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
    data = ref_to_bytes(ref)
    assert type(data) is bytes
    with Pool.open(pool.root) as other:
        assert other.read_blob(ref_from_bytes(data)) == b"plan"
    with pytest.raises(CorruptDataError, match="not a PoolRef"):
        ref_from_bytes(data[:-1])


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        ref = publish(pool, queue.lease("w", 1)[0])
        columns = pool.read_columns(ref, ["loss_mask"])
        assert list(columns) == ["loss_mask"]
        assert columns["loss_mask"].tolist() == [1] * 6
        with pytest.raises(
            StorageError, match=r"no columns \['routes'\], it has \['fields', 'loss_mask', 'sampler_log_probs'"
        ):
            pool.read_columns(ref, ["routes"])


def test_groups_without_tokens_are_stored_too(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        samples = samples_of(0)
        for sample in samples:
            sample.tokens, sample.response_length, sample.rollout_log_probs = [], 0, []
        lease = queue.lease("w", 1)[0].lease
        group = pool.read_group(pool.publish_groups([(encode_group(samples), lease)], submission_id="x")[0])
        assert decode_group(group.header, group.columns) == samples


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


def test_non_contiguous_and_big_endian_columns_are_stored_little_endian(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        group = encode_group(samples_of(0))
        columns: dict[str, Any] = dict(group.columns)
        columns["tokens"] = np.repeat(columns["tokens"], 2)[::2].astype(">i4")
        lease = queue.lease("w", 1)[0].lease
        ref = pool.publish_groups([(EncodedGroup(group.header, columns), lease)], submission_id="x")[0]
        assert decode_group(group.header, pool.read_group(ref).columns) == samples_of(0)


def test_threads_share_a_pool(pool: Pool) -> None:
    refs: dict[bytes, PoolRef] = {}

    def write(thread: int) -> None:
        for number in range(5):
            data = f"{thread}:{number}".encode()
            refs[data] = pool.publish_blob(data, submission_id=data.decode())
            assert pool.read_blob(refs[data]) == data

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refs) == 30
    assert all(pool.read_blob(ref) == data for data, ref in refs.items())


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


def test_a_closed_pool_says_so(pool: Pool) -> None:
    ref = pool.publish_blob(b"x", submission_id="1")
    pool.close()
    with pytest.raises(StorageError, match="is closed"):
        pool.publish_blob(b"y", submission_id="2")
    with pytest.raises(StorageError, match="is closed"):
        pool.read_blob(ref)


@pytest.mark.slow
def test_a_flipped_byte_is_refused_naming_the_file(pool: Pool) -> None:
    ref = pool.publish_blob(b"A" * 10000, submission_id="1")
    pack = pool.root / ref.path
    data = bytearray(pack.read_bytes())
    data[data.index(b"A" * 100) + 50] ^= 1
    pack.write_bytes(data)
    with Pool.open(pool.root) as other, pytest.raises(CorruptDataError, match=f"read {pack}: stored bytes"):
        other.read_blob(ref)
