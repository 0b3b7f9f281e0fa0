"""Everything of a sample lies in one publication: it is kept together and it is reclaimed together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from queue_helpers import samples_of

from storage.columns import encode_group, read_header
from storage.pool import Pool
from storage.refs import Lease, PoolRef, to_straw_ref
from vime.errors import StorageError


def publish_with_everything(pool: Pool) -> PoolRef:
    samples = samples_of(0)
    for sample in samples:
        sample.rollout_routed_experts = np.ones((4, 2, 2), np.uint8)
        sample.rollout_topk_token_ids = np.ones((3, 2), np.int32)
        sample.rollout_topk_log_probs = np.full((3, 2), -1.0, np.float32)
        sample.multimodal_inputs = {"image": np.zeros((8, 8), np.uint8)}
    lease = Lease("run", "queue", "task", "attempt", 1, "epoch", "token", "worker")
    return pool.publish_groups([(encode_group(samples), msgspec.msgpack.encode(lease))], submission_id="one")[0]


def test_one_reference_holds_header_routes_candidates_and_media(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        ref = publish_with_everything(pool)
        group = pool.read_group(ref)
    assert group.columns.keys() >= {"routes", "top_k_ids", "top_k_log_probs", "multimodal_inputs", "fields"}
    assert [spec.name for spec in read_header(group.header).columns] == list(group.columns)
    assert ref.num_records == 1 + len(group.columns)


@pytest.mark.parametrize("names", [["routes"], ["top_k_ids", "top_k_log_probs"], ["tokens"]])
def test_whichever_column_was_read_all_of_a_group_are_released_together(tmp_path: Path, names: list[str]) -> None:
    with Pool.create(tmp_path / "pool", "run", online_gc=True) as pool:
        ref = publish_with_everything(pool)
        pool.store.retain("trainer", [to_straw_ref(ref)])
        pool.store.release_publications([to_straw_ref(ref)])
        pool.store.seal()
        pool.store.collect_garbage()
        pool.read_columns(ref, names)
        columns = list(pool.read_group(ref).columns)
        pool.store.release("trainer")
        assert pool.store.collect_garbage()["reclaimed_files"] == 1
    with Pool.open(tmp_path / "pool") as pool:
        for name in columns:
            with pytest.raises(StorageError):
                pool.read_columns(ref, [name])
