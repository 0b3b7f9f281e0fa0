"""A group is few records: its head, and its columns, which share one where that takes no large copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import straw
from straw import store

from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage import group_records
from storage.columns import EncodedGroup
from storage.group_records import group_payloads
from storage.pool import Pool
from vime.errors import CorruptDataError

GROUP = wide_group(GroupShape(num_samples=2, num_tokens=50, num_layers=2, head=4))
SIZES = [array.nbytes for array in GROUP.columns.values()]


def test_small_columns_share_one_record() -> None:
    head, columns = group_payloads(GROUP)
    assert len(columns) == sum(SIZES)
    assert GROUP.header in bytes(head)


def test_a_column_that_would_make_a_record_too_large_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", sum(SIZES[:2]))
    _, first, *others = map(len, group_payloads(GROUP))
    assert first == sum(SIZES[:2])
    assert sum(others) == sum(SIZES[2:])


def test_large_columns_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", 0)
    _, *columns = group_payloads(GROUP)
    for payload, array in zip(columns, GROUP.columns.values(), strict=True):
        assert np.shares_memory(np.frombuffer(payload, np.uint8), array)


@pytest.mark.parametrize("joined_bytes", [0, 300, 500, 1 << 20])
def test_every_column_is_found_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined_bytes: int
) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", joined_bytes)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        monkeypatch.undo()
        found = pool.read_group(ref)
    assert found.header == GROUP.header
    assert list(found.columns) == list(GROUP.columns)
    assert all(np.array_equal(found.columns[name], array) for name, array in GROUP.columns.items())


def test_a_group_with_more_records_than_its_head_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_one_more(group: EncodedGroup) -> list[bytes | memoryview]:
        return [*group_payloads(group), b"more"]

    monkeypatch.setattr("storage.pool.group_payloads", with_one_more)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        with pytest.raises(CorruptDataError, match=r"has 3 records, for .* columns after the first"):
            pool.read_columns(ref, ["tokens"])
        assert pool.read_header(ref) == GROUP.header


def test_what_is_no_head_of_a_group_is_refused(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        ref = pool.publish_blob(b"a plan", submission_id="plan")
        with pytest.raises(CorruptDataError, match="head of a group, 6 bytes, can't be read"):
            pool.read_header(ref)


def test_many_prompts_are_one_publication_whose_list_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"prompt %d" % number for number in range(300)]
    with Pool.create(tmp_path / "pool", "run") as pool:
        refs = pool.publish_prompts(texts, submission_id="prompts")
    assert len({(ref.offset, ref.ordinal) for ref in refs}) == 2
    looks: list[straw.RecordSetRef] = []
    manifest = store._RecordReader.manifest

    def counting(self: store._RecordReader, ref: straw.RecordSetRef) -> dict[str, Any]:
        looks.append(ref)
        found: dict[str, Any] = manifest(self, ref)
        return found

    monkeypatch.setattr(store._RecordReader, "manifest", counting)
    with Pool.open(tmp_path / "pool") as pool:
        assert [pool.read_blob(ref) for ref in refs] == texts
    assert len(looks) == 2
