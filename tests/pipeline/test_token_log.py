"""What the trainer made of each token is stored beside the run, and found again by sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.planner import BatchPlan
from pipeline.token_log import read_mean_gaps, read_trained_tokens, remove_token_logs, write_token_log
from vime.data.trained_tokens import TrainedTokens
from vime.errors import CorruptDataError


def plan(rollout_id: int = 3, branch: str = "b") -> BatchPlan:
    return BatchPlan(1, branch, rollout_id, 0, [], [], [])


def tokens(*log_probs: float, advantages: list[float] | None = None, gap: float = 0.1) -> TrainedTokens:
    own = [1.0] * len(log_probs) if advantages is None else advantages
    return TrainedTokens(np.array(log_probs, np.float32), np.array(own, np.float32), gap)


def test_each_sample_is_read_alone_from_the_file_of_its_rank(tmp_path: Path) -> None:
    write_token_log(tmp_path, 0, plan(), {7: tokens(-0.5, -0.25), 4: tokens(-1.0), 9: tokens()})
    write_token_log(tmp_path, 1, plan(), {8: tokens(-2.0, gap=0.7)})
    found = read_trained_tokens(tmp_path, "b", 3, 0, 7, 1.5)
    assert found is not None
    assert found.log_probs.tolist() == [-0.5, -0.25]
    assert found.advantages.tolist() == [1.5, 1.5], "that of the plan, where all tokens of a sample share it"
    assert read_trained_tokens(tmp_path, "b", 3, 0, 8, 0.0) is None
    assert read_trained_tokens(tmp_path, "c", 3, 0, 7, 0.0) is None
    assert read_mean_gaps(tmp_path, "b", 3) == pytest.approx({4: 0.1, 7: 0.1, 8: 0.7, 9: 0.1})


def test_advantages_are_stored_only_where_tokens_differ_in_them(tmp_path: Path) -> None:
    write_token_log(tmp_path, 0, plan(0), {1: tokens(-0.5, -0.25)})
    write_token_log(tmp_path, 0, plan(1), {1: tokens(-0.5, -0.25, advantages=[2.0, -1.0]), 2: tokens(-3.0)})
    assert "advantages" not in load_file(tmp_path / "0" / "b_0.safetensors")
    found = read_trained_tokens(tmp_path, "b", 1, 0, 1, 0.0)
    assert found is not None
    assert found.advantages.tolist() == [2.0, -1.0]


def test_a_batch_takes_four_bytes_a_token_and_little_more(tmp_path: Path) -> None:
    write_token_log(tmp_path, 0, plan(), {n: tokens(*np.zeros(1000)) for n in range(20)})
    assert 80_000 <= (tmp_path / "3" / "b_0.safetensors").stat().st_size < 82_000


def test_batches_up_to_one_are_removed_with_those_of_all_branches(tmp_path: Path) -> None:
    for rollout in range(4):
        for branch in ("a", "b"):
            write_token_log(tmp_path, 0, plan(rollout, branch), {1: tokens(-1.0)})
    remove_token_logs(tmp_path, None)
    remove_token_logs(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    remove_token_logs(tmp_path / "none", 7)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    write_token_log(tmp_path, 0, plan(), {1: tokens(-1.0)})
    path = tmp_path / "3" / "b_0.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CorruptDataError, match=r"b_0\.safetensors"):
        read_trained_tokens(tmp_path, "b", 3, 0, 1, 0.0)
    with pytest.raises(CorruptDataError, match="only what the trainer made"):
        read_mean_gaps(tmp_path, "b", 3)


def test_a_file_that_is_removed_while_the_batch_is_read_counts_as_not_there(tmp_path: Path) -> None:
    write_token_log(tmp_path, 0, plan(), {1: tokens(-1.0)})
    (tmp_path / "3" / "b_1.safetensors").symlink_to(tmp_path / "removed")
    assert read_mean_gaps(tmp_path, "b", 3) == pytest.approx({1: 0.1})
    assert read_trained_tokens(tmp_path, "b", 3, 1, 1, 0.0) is None
