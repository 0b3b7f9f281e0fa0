from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_helpers import samples_of

from storage.columns import SCHEMA_VERSION, ColumnSpec, decode_group, encode_group, read_header, summary_from_header
from storage.summary import summarize
from vime.errors import CorruptDataError, SampleError, SchemaVersionError
from vime.utils.types import Sample

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8)
PLAIN = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.integers(-(2**63), 2**63 - 1), inner, max_size=3)
    ),
    max_leaves=8,
)
NATS = st.integers(0, 2**31 - 1)


@st.composite
def groups(draw: st.DrawFn) -> list[Sample]:
    group_index = draw(NATS)
    return [draw(members(group_index)) for _ in range(draw(st.integers(1, 3)))]


@st.composite
def members(draw: st.DrawFn, group_index: int) -> Sample:
    tokens = draw(st.lists(NATS, max_size=6))
    length = draw(st.integers(0, len(tokens)))

    def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=length, max_size=length)

    return Sample(
        group_index=group_index,
        index=draw(NATS),
        rollout_id=draw(st.none() | NATS),
        prompt=draw(TEXT | st.lists(st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2)),
        tokens=tokens,
        response=draw(TEXT),
        response_length=length,
        label=draw(PLAIN),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        loss_mask=draw(st.none() | rows(st.integers(0, 1))),
        rollout_log_probs=draw(st.none() | rows(st.floats(width=32, allow_nan=False))),
        weight_versions=draw(st.lists(TEXT, max_size=2)),
        version_spans=draw(st.lists(st.tuples(NATS, NATS, NATS), max_size=2)),
        status=draw(st.sampled_from(Sample.Status)),
        metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
        session_id=draw(st.none() | TEXT),
        non_generation_time=draw(st.floats(0, 1e6)),
    )


def exact(value: object) -> object:
    """The value with its types and the bits of its floats, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return exact(vars(value))
    if isinstance(value, dict):
        return [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(item) for item in value])
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


@settings(max_examples=30, deadline=None)
@given(groups())
def test_a_group_comes_back_exactly(samples: list[Sample]) -> None:
    encoded = encode_group(samples)
    decoded = decode_group(encoded.header, encoded.columns)
    assert [exact(sample) for sample in decoded] == [exact(sample) for sample in samples]
    assert summary_from_header(encoded.header) == summarize(samples)


def test_columns_are_concatenated_with_row_offsets() -> None:
    first, second = samples_of(7)
    second.tokens, second.response_length = [5, 6], 1
    second.loss_mask, second.rollout_log_probs = [0], None
    encoded = encode_group([first, second])
    assert {name: array.dtype.str for name, array in encoded.columns.items()} == {
        "tokens": "<i4",
        "loss_mask": "|u1",
        "sampler_log_probs": "<f4",
    }
    assert encoded.columns["tokens"].tolist() == [1, 2, 10, 11, 12, 5, 6]
    assert encoded.columns["loss_mask"].tolist() == [1, 1, 1, 0]
    assert encoded.columns["sampler_log_probs"].tolist() == [-0.5, -0.5, -0.5, 0.0]
    table = {spec.name: spec for spec in read_header(encoded.header).columns}
    assert table["tokens"].row_offsets == [0, 5, 7]
    assert table["loss_mask"].absent == [0]
    assert table["sampler_log_probs"].absent == [1]


def test_the_layout_of_a_column_says_which_axis_counts_rows() -> None:
    rows_first = ColumnSpec("heads", "int32", [6, 4], [0, 6])
    layers_first = ColumnSpec("routes", "uint8", [2, 6, 4], [0, 6], layout="layer_major")
    assert (rows_first.layout, rows_first.row_axis, layers_first.row_axis) == ("row_major", 0, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layers_first), type=ColumnSpec) == layers_first
    unknown = msgspec.msgpack.encode(msgspec.structs.replace(layers_first, layout="columns_first"))
    with pytest.raises(msgspec.ValidationError, match="columns_first"):
        msgspec.msgpack.decode(unknown, type=ColumnSpec)


def test_the_summary_counts_what_planning_needs() -> None:
    first, second = samples_of(7)
    first.version_spans, first.loss_mask = [(3, 0, 1), (5, 1, 3)], [1, 0, 1]
    second.version_spans, second.reward, second.rollout_id = [], {"math": 0.5, "format": 1.0}, 99
    summary = summarize([first, second], reward_key="math")
    assert summary.group_index == 7
    assert summary.sample_indices == [14, 15]
    assert summary.rollout_ids == [14, 99]
    assert (summary.total_lengths, summary.response_lengths, summary.mask_sums) == ([5, 5], [3, 3], [2, 3])
    assert summary.rewards == [0.0, 0.5]
    assert (summary.min_versions, summary.max_versions) == ([3, None], [5, None])
    assert summary.statuses == ["completed", "completed"]
    assert summary.num_spanning_samples == 1


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tools": [1, 2, {3}]}, r"metadata.tools\[2\]: a value of type builtins.set can't be stored"),
        ({"a": {"b": np.float64(1.0)}}, r"metadata.a.b: a value of type numpy.float64 can't be stored"),
        ({"a": object}, r"metadata.a: a value of type builtins.type can't be stored"),
        ({"a": cyclic()}, r"metadata.a\[1\].again: the value contains itself"),
        ({"a": deep()}, r"nested deeper than 100 levels"),
        ({"a": {(1, 2): 3}}, r"metadata.a: a dict key of type tuple can't be stored"),
        ({"a": {True: 3}}, r"metadata.a: a dict key of type bool can't be stored"),
        ({"a": ("x", "\ud800")}, r"metadata.a\[1\]: character 0 of the text is an unpaired surrogate"),
    ],
)
def test_a_value_that_would_not_survive_is_named_by_its_path(metadata: dict[str, Any], message: str) -> None:
    first, second = samples_of(7)
    second.metadata = metadata
    with pytest.raises(SampleError, match=rf"sample 15 of group 7: .*{message}"):
        encode_group([first, second])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1, -1]}, r"tokens\[1\] is -1, allowed: an int from 0 to 2147483647"),
        ({"tokens": [1, 2.5, 3]}, r"tokens\[1\] is 2.5"),
        ({"loss_mask": [1, 1]}, r"loss_mask has 2 entries, allowed: 3"),
        ({"loss_mask": [1, True, 1]}, r"loss_mask\[1\] is True"),
        ({"loss_mask": [1, 2, 1]}, r"loss_mask\[1\] is 2"),
        ({"rollout_log_probs": [-0.5]}, r"rollout_log_probs has 1 entries, allowed: 3"),
        ({"rollout_log_probs": [-0.5, None, -0.5]}, r"rollout_log_probs\[1\] is None"),
        ({"rollout_log_probs": [-0.5, -1e300, -0.5]}, r"rollout_log_probs\[1\] is -1e\+300, beyond float32"),
        ({"index": None}, r"member 0 of group 7 has no index"),
        ({"group_index": 8}, r"member 1 has group_index 7, allowed: 8"),
        ({"reward": {"math": 1.0}}, r"reward is a dict with keys \['math'\], and the reward key is None"),
    ],
)
def test_a_field_that_breaks_the_contract_is_refused(changes: dict[str, Any], message: str) -> None:
    first, second = samples_of(7)
    with pytest.raises(SampleError, match=message):
        encode_group([dataclasses.replace(first, **changes), second])


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(SampleError, match="at least one sample"):
        encode_group([])


def test_missing_values_are_not_numbers() -> None:
    first, second = samples_of(7)
    first.reward, second.rollout_log_probs = None, [math.nan, 0.0, 0.0]
    encoded = encode_group([first, second])
    assert summary_from_header(encoded.header).rewards == [None, 1.0]
    log_probs = decode_group(encoded.header, encoded.columns)[1].rollout_log_probs
    assert log_probs is not None
    assert math.isnan(log_probs[0])


def test_a_newer_header_is_refused_with_both_versions() -> None:
    header = msgspec.msgpack.encode({"schema_version": SCHEMA_VERSION + 1, "unheard_of": 1})
    with pytest.raises(SchemaVersionError, match="schema version 2, this code reads up to 1"):
        read_header(header)


def test_damaged_headers_and_columns_are_refused() -> None:
    encoded = encode_group(samples_of(7))
    for header in (b"", b"junk", encoded.header[:-1]):
        with pytest.raises(CorruptDataError, match="header"):
            decode_group(header, encoded.columns)
    with pytest.raises(CorruptDataError, match="no column 'loss_mask'"):
        decode_group(encoded.header, {"tokens": encoded.columns["tokens"]})
    with pytest.raises(CorruptDataError, match="has 9 rows"):
        decode_group(encoded.header, {**encoded.columns, "tokens": encoded.columns["tokens"][:-1]})
    fields = msgspec.msgpack.decode(encoded.header)
    fields["samples"][0]["surprise"] = 1
    with pytest.raises(CorruptDataError, match=r"unknown sample fields \['surprise'\]"):
        decode_group(msgspec.msgpack.encode(fields), encoded.columns)
