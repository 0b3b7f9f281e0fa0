"""Debug archives name stored samples, keep them from being reclaimed, and say what is wrong with a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.wide_groups import lease_bytes
from storage.archive import ArchivedGroup, RolloutArchive
from storage.columns import encode_group
from storage.debug_samples import read_pt, write_pt
from storage.pool import Pool
from storage.retention import Retention
from vime.data.archive import RolloutArchive as DocumentedArchive
from vime.errors import DataError
from vime.utils.types import Sample


def sample(index: int, group: int) -> Sample:
    return Sample(
        group_index=group,
        index=index,
        prompt="p",
        tokens=[1, 2, 3, 4 + index],
        response="ab",
        response_length=2,
        reward={"score": 0.5},
        loss_mask=[1, 0],
        rollout_log_probs=[-0.5, -0.25],
        rollout_topk_token_ids=np.array([[3, 4], [5, 6]], np.int32),
        rollout_topk_log_probs=np.array([[-0.5, -1.5], [-0.25, -2.5]], np.float32),
        version_spans=[(3, 0, 2)],
        status=Sample.Status.TRUNCATED,
        metadata={"tools": ("a", 1), "scores": np.arange(3)},
    )


GROUPS = [[sample(4, 2), sample(5, 2)], [sample(0, 0), sample(1, 0)]]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "data" / "pool", "run") as made:
        yield made


@pytest.fixture
def archived(pool: Pool) -> list[ArchivedGroup]:
    items = [(encode_group(group, reward_key="score"), lease_bytes(number)) for number, group in enumerate(GROUPS)]
    refs = pool.publish_groups(items, submission_id="groups")
    return [
        ArchivedGroup(ref, group[0].group_index or 0, number, [s.index or 0 for s in group])
        for number, (ref, group) in enumerate(zip(refs, GROUPS, strict=True))
    ]


def test_an_archive_gives_back_each_sample_by_its_names(
    tmp_path: Path, pool: Pool, archived: list[ArchivedGroup]
) -> None:
    RolloutArchive.save(tmp_path / "7.straw.json", pool, archived, rollout_id=7)
    with DocumentedArchive.open(tmp_path / "7.straw.json") as archive:
        assert archive.rollout_id == 7
        assert [key.sample_key for key in archive.keys] == ["sample:4", "sample:5", "sample:0", "sample:1"]
        assert archive.load_samples() == [s for group in GROUPS for s in group]
        key = archive.keys[2]
        assert archive.load_samples(*key) == [GROUPS[1][0]]
        assert archive.load_samples(task_key=key.task_key) == GROUPS[1]
        with pytest.raises(KeyError, match="sample:9"):
            archive.load_samples("sample:9")


def test_an_archive_keeps_its_packs_until_it_is_released(
    tmp_path: Path, pool: Pool, archived: list[ArchivedGroup]
) -> None:
    packs = {group.ref.path for group in archived}
    RolloutArchive.save(tmp_path / "7.straw.json", pool, archived, rollout_id=7)
    assert Retention(pool.control_dir).retained_packs() == packs
    with RolloutArchive.open(tmp_path / "7.straw.json") as archive:
        archive.release()
    assert Retention(pool.control_dir).retained_packs() == set()


def test_an_archive_is_never_replaced_and_the_same_again_changes_nothing(
    tmp_path: Path, pool: Pool, archived: list[ArchivedGroup]
) -> None:
    path = tmp_path / "7.straw.json"
    index = RolloutArchive.save(path, pool, archived, rollout_id=7)
    assert RolloutArchive.save(path, pool, archived, rollout_id=7) == index
    with pytest.raises(FileExistsError):
        RolloutArchive.save(path, pool, archived[:1], rollout_id=7)
    with RolloutArchive.open(path) as archive:
        assert len(archive.keys) == 4


def test_archive_and_pool_can_be_moved_together(tmp_path: Path, pool: Pool, archived: list[ArchivedGroup]) -> None:
    RolloutArchive.save(tmp_path / "data" / "dumps" / "7.straw.json", pool, archived, rollout_id=7)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    with RolloutArchive.open(tmp_path / "moved" / "dumps" / "7.straw.json") as archive:
        assert archive.load_samples("sample:1") == [GROUPS[1][1]]
    shutil.move(tmp_path / "moved" / "pool", tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"its pool is not there \(looked in .*Mount or copy the pool"):
        RolloutArchive.open(tmp_path / "moved" / "dumps" / "7.straw.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "can't be read"),
        ({"format": "other", "version": 1}, "format 'other', version 1; allowed: 'vime.straw-debug'"),
        ({"format": "vime.straw-debug", "version": 9}, "version 9; allowed: 'vime.straw-debug', version 1 or older"),
        ({"format": "vime.straw-debug", "version": 1}, "missing required field"),
    ],
)
def test_a_file_that_is_no_archive_is_refused_by_name(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "7.straw.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as refused:
        RolloutArchive.open(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


def test_an_exported_file_holds_plain_types_and_tensors_alone(
    tmp_path: Path, pool: Pool, archived: list[ArchivedGroup]
) -> None:
    RolloutArchive.save(tmp_path / "7.straw.json", pool, archived, rollout_id=7)
    with RolloutArchive.open(tmp_path / "7.straw.json") as archive:
        archive.export_pt(tmp_path / "7.pt")
    content = torch.load(tmp_path / "7.pt", weights_only=True)
    assert content["rollout_id"] == 7
    first = content["samples"][0]
    assert first["status"] == "truncated"
    assert first["rollout_topk_token_ids"].dtype == torch.int32
    assert first["metadata"]["tools"] == ("a", 1)


def test_samples_survive_a_pt_file(tmp_path: Path) -> None:
    write_pt(tmp_path / "7.pt", 7, GROUPS[0])
    (first, second) = read_pt(tmp_path / "7.pt")
    assert isinstance(first.metadata["scores"], torch.Tensor), "arrays elsewhere than in a sample's own are tensors"
    for found, wanted in zip((first, second), GROUPS[0], strict=True):
        assert {**found.to_dict(), "metadata": None}.keys() == wanted.to_dict().keys()
        assert np.array_equal(found.rollout_topk_log_probs, wanted.rollout_topk_log_probs)
        assert (found.tokens, found.reward, found.status) == (wanted.tokens, wanted.reward, wanted.status)
        assert found.version_spans == wanted.version_spans


def test_what_is_neither_plain_nor_a_tensor_is_refused_by_its_path(tmp_path: Path) -> None:
    odd = Sample(index=3, metadata={"deep": [object()]})
    with pytest.raises(DataError, match=r"sample 3\.metadata\.deep\[0\]: a value of type builtins\.object"):
        write_pt(tmp_path / "7.pt", 7, [odd])
    assert not (tmp_path / "7.pt").exists()


class Tripwire:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("ran",))


@pytest.mark.parametrize("content", [{"samples": [Tripwire()]}, [1, 2], {"samples": [3], "rollout_id": 0}, b"junk"])
def test_a_pt_file_with_anything_else_is_refused_and_runs_nothing(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "7.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError, match=r"7\.pt"):
        read_pt(path)
    assert capsys.readouterr().out == ""
