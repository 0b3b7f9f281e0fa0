"""Every byte of a column is in exactly one chunk, and a part of it is found in the chunks that hold it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import chunks
from storage.chunk_layout import WINDOW_BYTES, ChunkLayout, joined
from storage.chunks import DIGEST_BYTES, ColumnDigests, chunk_table, column_bytes, read_chunk_table
from storage.columns import Array, ColumnSpec
from vime.errors import CorruptDataError, SchemaVersionError


def column(layers: int | None, members: list[int], width: int, dtype: str) -> tuple[ColumnSpec, Array]:
    """A column with random content; `layers` None: rows come first."""
    offsets = np.cumsum([0, *members]).tolist()
    shape = [offsets[-1], width] if layers is None else [layers, offsets[-1], width]
    array = (np.arange(np.prod(shape), dtype=np.int64) % 251).astype(dtype).reshape(shape)
    layout = "row_major" if layers is None else "layer_major"
    return ColumnSpec("x", dtype, shape, offsets, layout=layout), array


columns = st.builds(
    column,
    st.one_of(st.none(), st.integers(1, 3)),
    st.lists(st.sampled_from([0, 1, 5, 511, 512, 513, 1100]), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3, 128]),
    st.sampled_from(["uint8", "float32"]),
)


@settings(max_examples=50, deadline=None)
@given(columns, st.data())
def test_any_part_is_put_together_from_chunks_that_match_their_digests(
    made: tuple[ColumnSpec, Array], data: st.DataObject
) -> None:
    spec, array = made
    content = column_bytes(array)
    found = read_chunk_table(chunk_table([spec], {"x": column_bytes(array)}, [1])).columns["x"]
    layout = ChunkLayout.of(spec, found.rows_per_chunk)
    found.check("x", layout)
    member = data.draw(st.integers(0, layout.num_members - 1))
    start = data.draw(st.integers(0, layout.num_rows(member)))
    stop = data.draw(st.integers(start, layout.num_rows(member)))
    first = data.draw(st.integers(0, layout.num_layers))
    layers = range(first, data.draw(st.integers(first, layout.num_layers)))
    part = b""
    for run in joined(layout.rows(layers, member, range(start, stop))):
        read = content[run.offset : run.offset + run.num_bytes]
        assert found.first_bad_chunk(run, read) is None
        part += read[run.skip : run.skip + run.take]
    rows = slice(spec.row_offsets[member] + start, spec.row_offsets[member] + stop)
    wanted = array[rows] if spec.layout == "row_major" else array[layers.start : layers.stop, rows]
    assert part == (wanted.tobytes() if layers else b"")


@settings(max_examples=30, deadline=None)
@given(columns)
def test_the_whole_column_is_read_once_in_order(made: tuple[ColumnSpec, Array]) -> None:
    spec, array = made
    content = column_bytes(array)
    layout = ChunkLayout.of(spec)
    runs = list(joined(layout.everything()))
    assert b"".join(content[run.offset : run.offset + run.take] for run in runs) == content
    assert sum(len(run.chunk_bytes) for run in runs) == layout.num_chunks
    assert all(run.num_bytes <= WINDOW_BYTES for run in runs)


@pytest.mark.parametrize("rows", [range(100, 1500), range(1400), range(100, 1400), range(1500)])
def test_layers_that_touch_are_joined_only_where_nothing_lies_between(rows: range) -> None:
    spec, array = column(3, [1500], 8, "uint8")
    content = column_bytes(array)
    runs = list(joined(ChunkLayout.of(spec).rows(range(3), 0, rows)))
    parts = [content[run.offset + run.skip : run.offset + run.skip + run.take] for run in runs]
    assert b"".join(parts) == array[:, rows.start : rows.stop].tobytes()
    assert len(runs) == (1 if len(rows) == 1500 else 3)


def test_the_rows_of_one_member_are_whole_chunks_wherever_they_lie() -> None:
    spec, _ = column(6, [777, 1301, 5], 8, "uint8")
    layout = ChunkLayout.of(spec)
    for member in range(3):
        for run in layout.rows(range(1, 4), member, range(layout.num_rows(member))):
            assert (run.skip, run.take) == (0, run.num_bytes)


@pytest.mark.parametrize(("row_bytes", "rows_per_chunk"), [(1, 4096), (8, 512), (512, 64), (100_000, 1)])
def test_chunks_are_small_where_rows_are_and_never_less_than_a_row(row_bytes: int, rows_per_chunk: int) -> None:
    spec = ColumnSpec("x", "uint8", [10, row_bytes], [0, 10])
    assert ChunkLayout.of(spec).rows_per_chunk == rows_per_chunk


def test_a_chunk_that_differs_is_found() -> None:
    spec, array = column(None, [2000], 8, "uint8")
    found = read_chunk_table(chunk_table([spec], {"x": column_bytes(array)}, [1])).columns["x"]
    array[1999, 7] ^= 1
    (run,) = joined(ChunkLayout.of(spec).everything())
    assert found.first_bad_chunk(run, column_bytes(array)) == 3


def test_digests_that_do_not_fit_the_column_are_refused() -> None:
    layout = ChunkLayout.of(ColumnSpec("x", "int32", [600, 8], [0, 600]))
    with pytest.raises(CorruptDataError, match="x has 8 bytes of digests; expected 16 for its 19200 bytes"):
        ColumnDigests(128, bytes(DIGEST_BYTES)).check("x", layout)


def test_a_newer_table_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TABLE_VERSION", 4)
    newer = chunk_table([], {}, [])
    monkeypatch.undo()
    with pytest.raises(SchemaVersionError, match="version 4, this code reads up to 3"):
        read_chunk_table(newer)
    with pytest.raises(CorruptDataError, match="of 3 bytes can't be read"):
        read_chunk_table(b"\x81\x00\x00")
