"""Everything of a sample lies in one publication: it is kept together and it is reclaimed together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from storage.columns import encode_group, read_header
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.refs import Lease, PoolRef
from storage.summary import summarize
from tests.storage.queue_helpers import finish, queue_of_two, samples_of
from vime.errors import StorageError


def publish_with_everything(pool: Pool, lease: bytes) -> PoolRef:
    samples = samples_of(0)
    for sample in samples:
        sample.rollout_routed_experts = np.ones((4, 2, 2), np.uint8)
        sample.rollout_topk_token_ids = np.ones((3, 2), np.int32)
        sample.rollout_topk_log_probs = np.full((3, 2), -1.0, np.float32)
        sample.multimodal_inputs = {"image": np.zeros((8, 8), np.uint8)}
    return pool.publish_groups([(encode_group(samples), lease)], submission_id="one")[0]


def test_one_reference_holds_header_routes_candidates_and_media(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        lease = Lease("run", "queue", "task", "attempt", 1, "epoch", "token", "worker")
        ref = publish_with_everything(pool, msgspec.msgpack.encode(lease))
        group = pool.read_group(ref)
    assert group.columns.keys() >= {"routes", "top_k_ids", "top_k_log_probs", "multimodal_inputs", "fields"}
    assert [spec.name for spec in read_header(group.header).columns] == list(group.columns)
    assert ref.num_records == 1


@pytest.mark.parametrize("names", [["routes"], ["top_k_ids", "top_k_log_probs"], ["tokens"]])
def test_whichever_column_was_read_all_of_a_group_are_reclaimed_together(tmp_path: Path, names: list[str]) -> None:
    root = tmp_path / "pool"
    with queue_of_two(root) as (pool, producer, queue):
        first, second = queue.lease("w", 2)
        ref = publish_with_everything(producer, first.lease)
        receipt = queue.accept(first.lease, ref, summarize(samples_of(0)))
        finish(producer, queue, second)  # the writer goes on in another pack
        pool.read_columns(ref, names)
        columns = list(pool.read_group(ref).columns)
        trained = PositionRanges.of([receipt.position])
        queue.rotate("main", trained, trained)
        assert queue.collect_garbage().packs == 1
    with Pool.open(root) as again:
        for name in columns:
            with pytest.raises(StorageError):
                again.read_columns(ref, [name])
