"""Stored rollouts become groups that a trainer rank can read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from pipeline.debug.stored import StoredRollouts, grouped, thinned
from storage.archive import ArchivedGroup, RolloutArchive, publish_copies
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import decode_group, encode_group
from storage.debug_samples import write_pt
from storage.pool import Pool
from vime.errors import DataError, SampleError
from vime.utils.types import Sample


def sample(index: int, *, group_size: int = 2) -> Sample:
    return Sample(
        group_index=index // group_size,
        index=index,
        tokens=[1, 2, 3],
        response_length=2,
        reward=float(index),
        rollout_log_probs=[-0.5, -0.25],
        version_spans=[(1, 0, 2)],
        status=Sample.Status.COMPLETED,
    )


def stored(folder: Path, name: str, subsample: float | None = None) -> StoredRollouts:
    return StoredRollouts(
        str(folder / name),
        scratch=folder / "scratch",
        group_size=2,
        encode=encode_group,
        check=partial(check_enqueue, needs=EnqueueRequirements()),
        subsample=subsample,
    )


def indices(rollouts: StoredRollouts, rollout_id: int) -> list[list[int | None]]:
    groups = [rollouts.pool.read_group(group.ref) for group in rollouts.batch(rollout_id)]
    return [[s.index for s in decode_group(group.header, group.columns)] for group in groups]


def archive(folder: Path, pool: Pool, rollout_id: int, samples: Sequence[Sample]) -> None:
    groups = grouped(samples, 2)
    refs = publish_copies(pool, [encode_group(group) for group in groups], submission_id=f"{folder}:{rollout_id}")
    archived = [
        ArchivedGroup(ref, group[0].group_index or 0, None, [s.index or 0 for s in group])
        for ref, group in zip(refs, groups, strict=True)
    ]
    RolloutArchive.save(folder / f"{rollout_id}.straw.json", pool, archived, rollout_id=rollout_id)


def test_samples_of_a_pt_file_are_published_for_the_session_and_go_with_it(tmp_path: Path) -> None:
    write_pt(tmp_path / "0.pt", 0, [sample(n) for n in range(6)])
    with stored(tmp_path, "{rollout_id}.pt") as rollouts:
        assert indices(rollouts, 0) == [[0, 1], [2, 3], [4, 5]]
        assert [group.summary.rewards for group in rollouts.batch(0)][1] == [2.0, 3.0]
    assert not (tmp_path / "scratch").exists()


def test_whole_archives_are_read_where_they_are(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        archive(tmp_path, pool, 0, [sample(n) for n in range(4)])
    with stored(tmp_path, "{rollout_id}.straw.json") as rollouts:
        assert rollouts.pool.root == tmp_path / "pool"
        assert indices(rollouts, 0) == [[0, 1], [2, 3]]
    assert (tmp_path / "pool").exists()


def test_a_part_of_an_archive_is_published_anew(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        archive(tmp_path, pool, 0, [sample(n) for n in range(8)])
    with stored(tmp_path, "{rollout_id}.straw.json", subsample=0.5) as rollouts:
        assert rollouts.pool.root != tmp_path / "pool"
        assert indices(rollouts, 0) == [[0, 1], [6, 7]]


def test_archives_of_two_pools_are_refused_naming_both(tmp_path: Path) -> None:
    for rollout_id in range(2):
        with Pool.create(tmp_path / f"pool_{rollout_id}", "run") as pool:
            archive(tmp_path, pool, rollout_id, [sample(n) for n in range(2)])
    match = r"pool_1 .*pool_0 .*allowed: one pool"
    with stored(tmp_path, "{rollout_id}.straw.json") as rollouts, pytest.raises(DataError, match=match):
        rollouts.batch(1)


def test_a_missing_rollout_is_named(tmp_path: Path) -> None:
    write_pt(tmp_path / "0.pt", 0, [sample(0)])
    with stored(tmp_path, "{rollout_id}.pt") as rollouts, pytest.raises(DataError, match=r"1\.pt: No such file"):
        rollouts.batch(1)


def test_a_sample_that_can_not_be_trained_is_refused_with_its_file(tmp_path: Path) -> None:
    bad = sample(1)
    bad.rollout_log_probs = [float("nan"), -0.5]
    write_pt(tmp_path / "0.pt", 0, [sample(0), bad])
    with stored(tmp_path, "0.pt") as rollouts, pytest.raises(SampleError, match=r"0\.pt: .*sample 1"):
        rollouts.batch(0)


@pytest.mark.parametrize(("fraction", "kept"), [(None, [0, 1, 2, 3, 4]), (0.6, [0, 3, 4]), (0.8, [0, 1, 3, 4])])
def test_a_fraction_keeps_the_first_and_the_last_samples(fraction: float | None, kept: list[int]) -> None:
    assert [s.index for s in thinned([sample(n) for n in range(5)], fraction, Path("f"))] == kept


def test_a_fraction_that_keeps_none_is_refused() -> None:
    with pytest.raises(DataError, match=r"5 samples, of which 0\.1 are to be used, are none"):
        thinned([sample(n) for n in range(5)], 0.1, Path("f"))


def test_samples_without_numbers_are_grouped_by_their_place() -> None:
    groups = grouped([Sample() for _ in range(4)], 2)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]]
    assert [group[0].group_index for group in groups] == [0, 1]
