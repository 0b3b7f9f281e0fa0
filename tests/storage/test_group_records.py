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
from storage.chunks import SharedPlace, column_bytes
from storage.columns import EncodedGroup
from storage.group_records import Payload, TransactionPayloads, transaction_payloads
from storage.pool import Pool
from storage.refs import PoolRef
from vime.errors import CorruptDataError

GROUP = wide_group(GroupShape(num_samples=2, num_tokens=50, num_layers=2, head=4))
SIZES = [array.nbytes for array in GROUP.columns.values()]


def payloads_of_one(group: EncodedGroup) -> list[Payload]:
    """The payloads of a group that becomes durable alone."""
    payloads = transaction_payloads([group])
    assert payloads.shared == []
    return payloads.groups[0]


def test_small_columns_share_one_record() -> None:
    head, columns = payloads_of_one(GROUP)
    assert len(columns) == sum(SIZES)
    assert GROUP.header in bytes(head)


def test_a_column_that_would_make_a_record_too_large_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", sum(SIZES[:2]))
    _, first, *others = map(len, payloads_of_one(GROUP))
    assert first == sum(SIZES[:2])
    assert sum(others) == sum(SIZES[2:])


def test_large_columns_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", 0)
    _, *columns = payloads_of_one(GROUP)
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
    def with_one_more(groups: list[EncodedGroup]) -> TransactionPayloads:
        return TransactionPayloads([], [[*payloads_of_one(group), b"more"] for group in groups])

    monkeypatch.setattr("storage.pool.transaction_payloads", with_one_more)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        with pytest.raises(CorruptDataError, match=r"has 3 records, for .* columns after the first"):
            pool.read_columns(ref, ["tokens"])
        assert pool.read_header(ref) == GROUP.header


def small_groups(num_groups: int) -> list[EncodedGroup]:
    """Groups of different sizes and content."""
    return [wide_group(GroupShape(2, 30 + number, 2, 2, 4), number) for number in range(num_groups)]


def items_of(groups: list[EncodedGroup]) -> list[tuple[EncodedGroup, bytes]]:
    return [(group, lease_bytes(number)) for number, group in enumerate(groups)]


def check_all_found(pool: Pool, groups: list[EncodedGroup], refs: list[PoolRef]) -> None:
    for group, ref in zip(groups, refs, strict=True):
        found = pool.read_group(ref)
        assert found.header == group.header
        assert all(np.array_equal(found.columns[name], array) for name, array in group.columns.items())


def test_small_groups_of_one_transaction_share_a_record_for_their_columns() -> None:
    groups = small_groups(3)
    payloads = transaction_payloads(groups)
    assert payloads.shared == [b"".join(column_bytes(x) for group in groups for x in group.columns.values())]
    assert [len(parts) for parts in payloads.groups] == [1, 1, 1]


@pytest.mark.parametrize("shared_bytes", [1, 5000, 1 << 20])
def test_groups_are_found_in_the_records_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_bytes: int
) -> None:
    monkeypatch.setattr(group_records, "SHARED_BYTES", shared_bytes)
    groups = small_groups(5)
    with Pool.create(tmp_path / "pool", "run") as pool:
        pool.publish_blob(b"before", submission_id="before")
        check_all_found(pool, groups, pool.publish_groups(items_of(groups), submission_id="groups"))


def test_a_large_group_beside_small_ones_keeps_records_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", sum(SIZES) - 1)
    groups = [wide_group(GroupShape(1, 10, 1, 1, 0), 1), GROUP, wide_group(GroupShape(1, 11, 1, 1, 0), 2)]
    assert [len(parts) for parts in transaction_payloads(groups).groups] == [1, 3, 1]
    with Pool.create(tmp_path / "pool", "run") as pool:
        check_all_found(pool, groups, pool.publish_groups(items_of(groups), submission_id="groups"))


def test_damage_in_a_shared_record_is_told_from_the_groups_that_it_spares(tmp_path: Path) -> None:
    groups = small_groups(3)
    with Pool.create(tmp_path / "pool", "run") as pool:
        refs = pool.publish_groups(items_of(groups), submission_id="groups")
        pack = pool.root / refs[1].path
        content = pack.read_bytes()
        tokens = column_bytes(groups[1].columns["tokens"]).tobytes()
        assert content.count(tokens) == 1
        pack.write_bytes(content.replace(tokens, b"\xff" + tokens[1:]))
        check_all_found(pool, [groups[0], groups[2]], [refs[0], refs[2]])
        with pytest.raises(CorruptDataError):
            pool.read_columns(refs[1], ["tokens"])


@pytest.mark.parametrize(
    "place", [SharedPlace(99, 0, 10), SharedPlace(-1, 0, 10), SharedPlace(0, 1 << 20, 10), SharedPlace(0, -1, 10)]
)
def test_a_place_outside_the_shared_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: SharedPlace
) -> None:
    monkeypatch.setattr(group_records._SharedRecords, "add", lambda *_: place)
    with Pool.create(tmp_path / "pool", "run") as pool:
        ref = pool.publish_groups(items_of(small_groups(2)), submission_id="groups")[0]
        with pytest.raises(CorruptDataError, match=f"10 bytes at {place.offset} in record {place.ordinal}, of records"):
            pool.read_columns(ref, ["tokens"])


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
