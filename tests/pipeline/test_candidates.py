"""Candidates come back from the pool as the sampler gave them, member by member, and as the objective asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.wide_groups import lease_bytes
from pipeline.candidates import CandidateNeeds, candidate_needs, read_nucleus, read_teacher, read_top_k
from pipeline.members import StoredMember
from pipeline.planner import PlannedSample
from storage.columns import encode_group
from storage.pool import Pool
from vime.errors import TrainerError
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

NOTHING: dict[str, Any] = {}


def top_k(first: int, length: int, k: int = 3) -> dict[str, Any]:
    """k candidates at each token: first, first + 1, ... with falling probabilities."""
    ids = first + np.arange(length * k).reshape(length, k)
    return {"rollout_topk_token_ids": ids, "rollout_topk_log_probs": -0.25 * (1 + ids - first)}


def nucleus(*rows: Sequence[int]) -> dict[str, Any]:
    """What top-p left at each token, equally probable."""
    counts = [len(row) for row in rows]
    return {
        "rollout_top_p_token_ids": np.array([item for row in rows for item in row], np.int64),
        "rollout_top_p_token_offsets": np.cumsum([0, *counts]),
        "rollout_top_p_log_probs": np.array([-0.5 * count for count in counts for _ in range(count)]),
    }


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run") as made:
        yield made


def stored(pool: Pool, *members: tuple[int, dict[str, Any]]) -> list[StoredMember]:
    """One group of members, given as response length and fields."""
    group = [
        Sample(
            group_index=0,
            index=40 + number,
            tokens=list(range(2 + length)),
            response_length=length,
            rollout_log_probs=[-0.5] * length,
            reward=1.0,
            status=Sample.Status.COMPLETED,
            **fields,
        )
        for number, (length, fields) in enumerate(members)
    ]
    (ref,) = pool.publish_groups([(encode_group(group), lease_bytes())], submission_id=f"{members}")
    return [
        StoredMember(pool, ref, PlannedSample(0, number, 40 + number, 2 + length, length, 0.0, 1.0, 1.0, 0, False))
        for number, (length, _) in enumerate(members)
    ]


def masks(members: Sequence[StoredMember], *masked: int) -> list[np.ndarray]:
    return [
        np.full(member.sample.response_length, number not in masked, np.uint8) for number, member in enumerate(members)
    ]


def test_most_probable_tokens_of_each_member_follow_one_another(pool: Pool) -> None:
    members = stored(pool, (2, top_k(0, 2)), (1, top_k(50, 1)))
    found = read_top_k(members[::-1], masks(members), 3)
    assert found.ids.tolist() == [[50, 51, 52], [0, 1, 2], [3, 4, 5]]
    assert found.log_probs[1].tolist() == [-0.25, -0.5, -0.75]
    assert (found.ids.dtype, found.log_probs.dtype) == (np.int32, np.float32)


def test_the_first_candidates_of_wider_rows_are_taken(pool: Pool) -> None:
    members = stored(pool, (2, top_k(0, 2)))
    assert read_top_k(members, masks(members), 2).ids.tolist() == [[0, 1], [3, 4]]


def test_fewer_candidates_than_asked_for_are_refused(pool: Pool) -> None:
    members = stored(pool, (2, top_k(0, 2)))
    with pytest.raises(TrainerError, match=r"sample 40: 3 candidates are stored .* at least 4 \(--score-centering-top"):
        read_top_k(members, masks(members), 4)


@pytest.mark.parametrize("other", [top_k(50, 1), NOTHING])
def test_a_masked_sample_without_candidates_gets_different_ids_whose_probabilities_leave_a_tail(
    pool: Pool, other: dict[str, Any]
) -> None:
    members = stored(pool, (2, NOTHING), (1, other))
    found = read_top_k(members, masks(members, 0, 1), 3)
    assert found.ids.shape == found.log_probs.shape == (3, 3)
    assert found.ids[:2].tolist() == [[0, 1, 2]] * 2
    assert np.exp(found.log_probs[:2]).sum(-1) == pytest.approx([0.5, 0.5])


def test_a_teachers_log_probabilities_come_with_the_samples_that_have_them(pool: Pool) -> None:
    scored = stored(pool, (2, {"teacher_log_probs": [-1.0, -2.0]}), (1, NOTHING), (1, {"teacher_log_probs": [-3.0]}))
    found = read_teacher(scored[::-1])
    assert found is not None
    assert found.dtype == np.float32
    assert found.tolist() == [-3.0, 0.0, -1.0, -2.0]
    assert read_teacher(stored(pool, (2, NOTHING))) is None


def test_nuclei_of_each_member_follow_one_another_with_offsets_that_go_on(pool: Pool) -> None:
    members = stored(pool, (2, nucleus([4, 5], [6])), (3, nucleus([], [7, 8, 9], [1])))
    found = read_nucleus(members[::-1], masks(members), log_probs=True)
    assert found.ids.tolist() == [7, 8, 9, 1, 4, 5, 6]
    assert found.offsets.tolist() == [0, 0, 3, 4, 6, 7]
    assert found.log_probs is not None
    assert found.log_probs.tolist() == [-1.5, -1.5, -1.5, -0.5, -1.0, -1.0, -0.5]
    assert (found.ids.dtype, found.offsets.dtype, found.log_probs.dtype) == (np.int32, np.int64, np.float32)


def test_log_probabilities_of_nuclei_are_left_out_where_nothing_asks(pool: Pool) -> None:
    members = stored(pool, (2, nucleus([4, 5], [6])))
    assert read_nucleus(members, masks(members), log_probs=False).log_probs is None


@pytest.mark.parametrize("other", [nucleus([7], [8, 9]), NOTHING])
def test_a_masked_sample_without_nuclei_has_tokens_without_ids(pool: Pool, other: dict[str, Any]) -> None:
    members = stored(pool, (1, NOTHING), (2, other))
    found = read_nucleus(members, masks(members, 0, 1), log_probs=True)
    assert np.diff(found.offsets).tolist() == ([0, 1, 2] if other else [0, 0, 0])
    assert len(found.ids) == found.offsets[-1]


def test_a_trained_sample_without_candidates_is_refused(pool: Pool) -> None:
    members = stored(pool, (2, NOTHING), (1, top_k(0, 1) | nucleus([0])))
    with pytest.raises(TrainerError, match="sample 40: no candidates are stored, but it has 2 trained tokens"):
        read_top_k(members, masks(members), 3)
    with pytest.raises(
        TrainerError, match="sample 40: no tokens that top-p left are stored, but it has 2 trained tokens"
    ):
        read_nucleus(members, masks(members), log_probs=False)


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ("", CandidateNeeds()),
        ("--use-score-centering --score-centering-top-k 7", CandidateNeeds(top_k=7)),
        ("--rollout-top-p 0.9", CandidateNeeds(nucleus=True)),
        ("--use-score-centering --rollout-top-p 0.9", CandidateNeeds(nucleus=True, nucleus_log_probs=True)),
    ],
)
def test_the_objective_says_which_candidates_are_read(words: str, needs: CandidateNeeds) -> None:
    assert candidate_needs(parse_settings(words.split())) == needs
