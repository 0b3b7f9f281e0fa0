"""Group normalisation against a slow reference."""

from __future__ import annotations

import statistics
import subprocess
import sys

import numpy as np
import pytest

from vime.algorithms.rewards import normalize_rewards
from vime.errors import SampleError


def test_advantages_equal_the_formula_for_interleaved_groups() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=40), rng.integers(0, 7, 40)
    found = normalize_rewards(rewards, groups)
    for index in range(40):
        members = [rewards[other] for other in range(40) if groups[other] == groups[index]]
        expected = (rewards[index] - sum(members) / len(members)) / (statistics.stdev(members) + 1e-6)
        assert found[index] == pytest.approx(expected, rel=1e-6)
    assert found.dtype == np.float32


def test_hand_computed_group() -> None:
    # Mean 0.5, Bessel-corrected deviation sqrt(4 * 0.25 / 3) = 0.57735.
    found = normalize_rewards([1.0, 0.0, 0.0, 1.0], [5, 5, 5, 5])
    assert found == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-6)


def test_group_of_one_gets_zero() -> None:
    assert normalize_rewards([3.0, 1.0, 2.0], [0, 1, 1])[0] == 0.0


def test_constant_group_gets_exact_zeros_though_its_mean_rounds() -> None:
    assert normalize_rewards([0.1] * 3, [4] * 3).tolist() == [0.0, 0.0, 0.0]


def test_without_std_normalisation_rewards_are_only_centred() -> None:
    assert normalize_rewards([3.0, 1.0], [0, 0], std_normalization=False).tolist() == [1.0, -1.0]


def test_segments_of_one_rollout_count_once_and_share_the_advantage() -> None:
    whole = normalize_rewards([1.0, 0.0, 4.0], [0, 0, 0])
    segments = normalize_rewards([1.0, 0.0, 0.0, 0.0, 4.0], [0, 0, 0, 0, 0], [7, 3, 3, 3, 9])
    assert segments.tolist() == [whole[0], whole[1], whole[1], whole[1], whole[2]]


@pytest.mark.parametrize(
    ("rewards", "groups", "rollouts", "part"),
    [
        ([1.0, float("nan")], [0, 8], None, "reward of sample 1 in group 8 is nan"),
        ([1.0, 2.0], [0], None, "2 rewards, 1 group ids"),
        ([1.0, 2.0], [0, 0], [5, 5], "segments of rollout 5 disagree"),
        ([1.0, 1.0], [0, 1], [5, 5], "segments of rollout 5 disagree"),
    ],
)
def test_bad_rewards_are_refused_by_name(
    rewards: list[float], groups: list[int], rollouts: list[int] | None, part: str
) -> None:
    with pytest.raises(SampleError, match=part):
        normalize_rewards(rewards, groups, rollouts)


def test_the_planner_can_use_it_without_torch() -> None:
    code = "import sys, vime.algorithms.rewards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_group_indices_a_full_batch_is_grouped_by_position() -> None:
    found = normalize_rewards([1.0, 3.0, 5.0, 5.0], [None] * 4, std_normalization=False, legacy_shape=(2, 2))
    assert found.tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_positions_count_rollouts_not_segments() -> None:
    found = normalize_rewards(
        [1.0, 1.0, 3.0, 5.0, 9.0], [None] * 5, [70, 70, 20, 50, 10], std_normalization=False, legacy_shape=(2, 2)
    )
    assert found.tolist() == [-1.0, -1.0, 1.0, -2.0, 2.0]


@pytest.mark.parametrize("legacy_shape", [None, (2, 2)])
def test_without_group_indices_any_other_count_is_one_group(legacy_shape: tuple[int, int] | None) -> None:
    found = normalize_rewards([1.0, 3.0, 5.0], [None] * 3, std_normalization=False, legacy_shape=legacy_shape)
    assert found.tolist() == [-2.0, 0.0, 2.0]


def test_samples_with_and_without_a_group_index_are_refused_together() -> None:
    with pytest.raises(SampleError, match="sample 1 has no group_index, 2 of 3 samples have one; allowed: all or none"):
        normalize_rewards([1.0, 2.0, 3.0], [0, None, 0])
