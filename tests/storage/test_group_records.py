"""A group is few records: one if it is small, else its head, and its columns, which share one up to a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import straw
from straw import store

from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage import chunks, group_records, live
from storage.chunks import no_chunk_table, read_chunk_table
from storage.columns import EncodedGroup
from storage.group_head import head_with_columns
from storage.group_records import group_payloads
from storage.pool import Pool
from vime.errors import CorruptDataError, SchemaVersionError

GROUP = wide_group(GroupShape(num_samples=2, num_tokens=50, num_layers=2, head=4))
SIZES = [array.nbytes for array in GROUP.columns.values()]


def assert_equal(found: EncodedGroup, expected: EncodedGroup) -> None:
    assert found.header == expected.header
    assert list(found.columns) == list(expected.columns)
    assert all(np.array_equal(found.columns[name], array) for name, array in expected.columns.items())


@pytest.fixture
def head_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a group that is too large for one record."""
    monkeypatch.setattr(group_records, "ONE_RECORD_BYTES", sum(SIZES) - 1)


def test_a_small_group_is_one_record() -> None:
    (payload,) = map(bytes, group_payloads(GROUP))
    assert GROUP.header in payload
    assert payload.endswith(b"".join(array.tobytes() for array in GROUP.columns.values()))


@pytest.mark.usefixtures("head_apart")
def test_small_columns_of_a_larger_group_share_one_record() -> None:
    head, columns = group_payloads(GROUP)
    assert len(columns) == sum(SIZES)
    assert GROUP.header in bytes(head)


@pytest.mark.usefixtures("head_apart")
def test_a_column_that_would_make_a_record_too_large_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", sum(SIZES[:2]))
    _, first, *others = map(len, group_payloads(GROUP))
    assert first == sum(SIZES[:2])
    assert sum(others) == sum(SIZES[2:])


@pytest.mark.usefixtures("head_apart")
def test_large_columns_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", 0)
    _, *columns = group_payloads(GROUP)
    for payload, array in zip(columns, GROUP.columns.values(), strict=True):
        assert np.shares_memory(np.frombuffer(payload, np.uint8), array)


@pytest.mark.usefixtures("head_apart")
@pytest.mark.parametrize("joined_bytes", [0, 300, 500, 1 << 20])
def test_every_column_is_found_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined_bytes: int
) -> None:
    monkeypatch.setattr(group_records, "JOINED_BYTES", joined_bytes)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        monkeypatch.undo()
        assert_equal(pool.read_group(ref), GROUP)


@pytest.mark.usefixtures("head_apart")
def test_a_small_group_of_the_layout_before_comes_back_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TABLE_VERSION", 2)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        monkeypatch.undo()
        assert ref.num_records == 2
        assert_equal(pool.read_group(ref), GROUP)


def test_a_small_group_is_refused_with_its_version_by_who_knows_only_the_layout_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class HeadBefore(msgspec.Struct, array_like=True):
        header: bytes
        table: bytes

    head = msgspec.msgpack.decode(group_payloads(GROUP)[0], type=HeadBefore)
    assert head.header == GROUP.header
    monkeypatch.setattr(chunks, "TABLE_VERSION", 2)
    with pytest.raises(SchemaVersionError, match="version 3, this code reads up to 2"):
        read_chunk_table(head.table)


def test_any_part_of_a_small_group_comes_back_exactly(tmp_path: Path) -> None:
    tokens, routes = GROUP.columns["tokens"], GROUP.columns["routes"]
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        assert pool.read_header(ref) == GROUP.header
        assert_equal(pool.read_group(ref), GROUP)
        assert np.array_equal(pool.read_rows(ref, "tokens", 1, 7, 31), tokens[57:81])
        assert pool.read_rows(ref, "tokens", 1, 7, 7).shape == (0,)
        assert np.array_equal(pool.read_layers(ref, "routes", 1, range(1, 2), 3, 40), routes[1:2, 52:89])
        assert np.array_equal(pool.read_columns(ref, ["routes"])["routes"], routes)


def test_a_small_group_with_a_damaged_byte_is_refused_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "sleep", lambda _: None)
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
    pack = pool.root / ref.path
    content = bytearray(pack.read_bytes())
    content[content.index(GROUP.columns["routes"].tobytes()) + GROUP.columns["routes"].nbytes - 1] ^= 1
    pack.write_bytes(content)
    with Pool.open(pool.root) as fresh, pytest.raises(CorruptDataError, match=f"read {pack}: stored bytes"):
        fresh.read_rows(ref, "tokens", 0)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_small_group_whose_columns_have_another_size_than_the_header_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    columns = b"".join(array.tobytes() for array in GROUP.columns.values())
    other = memoryview(columns[:change] if change < 0 else columns + b"x")
    payload = head_with_columns(GROUP.header, no_chunk_table(), [other])
    monkeypatch.setattr("storage.pool.group_payloads", lambda _: [payload])
    with Pool.create(tmp_path / "pool", "run") as pool:
        (ref,) = pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")
        found = rf"have {sum(SIZES) + change} bytes together, expected {sum(SIZES)}\."
        with pytest.raises(CorruptDataError, match=found):
            pool.read_rows(ref, "tokens", 0)


@pytest.mark.usefixtures("head_apart")
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
