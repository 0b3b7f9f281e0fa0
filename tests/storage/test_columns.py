from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.columns import SCHEMA_VERSION, ColumnSpec, decode_group, encode_group, read_header, summary_from_header
from storage.summary import summarize
from tests.storage.queue_helpers import samples_of
from vime.errors import CorruptDataError, SampleError, SchemaVersionError
from vime.utils.types import Sample

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DTYPES = ("bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64")
NUMBERS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))
SCALARS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()]))
LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8) | NUMBERS
    | SCALARS
)  # fmt: skip
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
FLOATS = st.floats(width=32, allow_nan=False)


@st.composite
def groups(draw: st.DrawFn) -> list[Sample]:
    group_index, shape = draw(NATS), (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 3)))
    return [draw(members(group_index, *shape)) for _ in range(draw(st.integers(1, 3)))]


@st.composite
def members(draw: st.DrawFn, group_index: int, num_layers: int, top_k: int, head: int) -> Sample:
    tokens = draw(st.lists(NATS, max_size=6))
    length = draw(st.integers(0, len(tokens)))

    def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=length, max_size=length)

    def arrays(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
        return hnp.arrays(dtype, shape, elements=FLOATS if dtype == "float32" else NATS)

    offsets = np.cumsum([0, *draw(rows(st.integers(0, 3)))]).astype(np.int32)
    sample = Sample(
        group_index=group_index,
        index=draw(NATS),
        rollout_id=draw(st.none() | NATS),
        prompt=draw(TEXT | st.lists(st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2)),
        tokens=tokens,
        multimodal_inputs=draw(st.none() | st.dictionaries(TEXT, PLAIN, max_size=2)),
        multimodal_train_inputs=draw(st.none() | st.dictionaries(TEXT, NUMBERS, max_size=2)),
        multimodal_train_input_id=draw(LEAF),
        apply_chat_template_kwargs=draw(st.dictionaries(TEXT, LEAF, max_size=2)),
        response=draw(TEXT),
        response_length=length,
        label=draw(PLAIN),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        loss_mask=draw(st.none() | rows(st.integers(0, 1))),
        weight_versions=draw(st.lists(TEXT, max_size=2)),
        version_spans=draw(st.lists(st.tuples(NATS, NATS, NATS), max_size=2)),
        rollout_log_probs=draw(st.none() | rows(FLOATS)),
        rollout_topk_token_ids=draw(st.none() | arrays("int32", (length, head))),
        rollout_topk_log_probs=draw(st.none() | arrays("float32", (length, head))),
        rollout_top_p_token_ids=draw(st.none() | arrays("int32", (int(offsets[-1]),))),
        rollout_top_p_token_offsets=draw(st.none() | st.just(offsets)),
        rollout_top_p_log_probs=draw(st.none() | arrays("float32", (int(offsets[-1]),))),
        rollout_routed_experts=draw(st.none() | hnp.arrays("uint8", (max(0, len(tokens) - 1), num_layers, top_k))),
        teacher_log_probs=draw(st.none() | rows(FLOATS)),
        remove_sample=draw(st.booleans()),
        status=draw(st.sampled_from(Sample.Status)),
        metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
        train_metadata=draw(st.none() | st.dictionaries(TEXT, PLAIN, max_size=2)),
        generate_function_path=draw(st.none() | TEXT),
        custom_rm_path=draw(st.none() | TEXT),
        session_id=draw(st.none() | TEXT),
        non_generation_time=draw(st.floats(0, 1e6)),
        spec_info=Sample.SpecInfo(*draw(st.lists(NATS, min_size=4, max_size=4))),
        prefix_cache_info=Sample.PrefixCacheInfo(*draw(st.lists(NATS, min_size=2, max_size=2))),
    )
    vars(sample).update(draw(st.dictionaries(st.from_regex(r"own_[a-z]{1,4}", fullmatch=True), PLAIN, max_size=2)))
    return sample


def exact(value: object) -> object:
    """The value with its types and the bits of its floats, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return exact(dict(sorted(vars(value).items())))
    if isinstance(value, dict):
        return [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(item) for item in value])
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value), value.dtype, value.shape, value.tobytes())
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


@settings(max_examples=30, deadline=None)
@given(groups())
def test_a_group_comes_back_exactly_with_every_field(samples: list[Sample]) -> None:
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
        "fields": "|u1",
    }
    assert encoded.columns["tokens"].tolist() == [1, 2, 10, 11, 12, 5, 6]
    assert encoded.columns["loss_mask"].tolist() == [1, 1, 1, 0]
    assert encoded.columns["sampler_log_probs"].tolist() == [-0.5, -0.5, -0.5, 0.0]
    table = {spec.name: spec for spec in read_header(encoded.header).columns}
    assert table["tokens"].row_offsets == [0, 5, 7]
    assert table["loss_mask"].absent == [0]
    assert table["sampler_log_probs"].absent == [1]


def with_routes(rows: int, num_layers: int = 3, top_k: int = 2) -> list[Sample]:
    samples = samples_of(7)
    for number, sample in enumerate(samples):
        values = np.arange(rows * num_layers * top_k).reshape(rows, num_layers, top_k) + 100 * number
        sample.rollout_routed_experts = values
    return samples


def test_routes_lie_layer_by_layer_so_that_a_range_of_rows_of_a_layer_is_contiguous() -> None:
    samples = with_routes(4)
    encoded = encode_group(samples)
    spec = next(spec for spec in read_header(encoded.header).columns if spec.name == "routes")
    column = encoded.columns["routes"]
    assert (spec.layout, spec.shape, spec.row_offsets) == ("layer_major", [3, 8, 2], [0, 4, 8])
    assert column.flags.c_contiguous
    second = np.asarray(samples[1].rollout_routed_experts)
    first_byte = 8 * 2 + 4 * 2  # layer 1, first row of member 1
    assert column.tobytes()[first_byte : first_byte + 3 * 2] == second[:3, 1].astype(np.uint8).tobytes()


def test_chunks_of_routes_are_joined_in_order() -> None:
    samples = with_routes(4)
    whole = np.asarray(samples[0].rollout_routed_experts)
    samples[0].rollout_routed_experts = [whole[:1], whole[1:1], whole[1:]]
    encoded = encode_group(samples)
    decoded = decode_group(encoded.header, encoded.columns)[0].rollout_routed_experts
    assert np.array_equal(np.asarray(decoded), whole)


@pytest.mark.parametrize(
    ("num_experts", "greatest", "dtype"),
    [(256, 3, "uint8"), (257, 3, "uint16"), (65536, 3, "uint16"), (None, 255, "uint8"), (None, 256, "uint16")],
)
def test_routes_take_the_smallest_type_for_the_number_of_experts(
    num_experts: int | None, greatest: int, dtype: str
) -> None:
    samples = with_routes(1, num_layers=1, top_k=1)
    samples[0].rollout_routed_experts = np.full((1, 1, 1), greatest)
    samples[1].rollout_routed_experts = None
    encoded = encode_group(samples, num_experts=num_experts)
    assert encoded.columns["routes"].dtype.name == dtype
    decoded = decode_group(encoded.header, encoded.columns)
    assert np.asarray(decoded[0].rollout_routed_experts).tolist() == [[[greatest]]]
    assert decoded[1].rollout_routed_experts is None


def test_candidates_are_stored_as_float16_when_asked_and_come_back_as_float32() -> None:
    samples = samples_of(7)
    samples[0].rollout_topk_token_ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    samples[0].rollout_topk_log_probs = np.full((3, 2), -1.2345678, np.float32)
    encoded = encode_group(samples, sc_dtype="float16")
    assert encoded.columns["top_k_log_probs"].dtype == np.float16
    assert encoded.columns["sampler_log_probs"].dtype == np.float32
    decoded = decode_group(encoded.header, encoded.columns)
    log_probs = decoded[0].rollout_topk_log_probs
    assert log_probs is not None
    assert log_probs.dtype == np.float32
    assert np.abs(log_probs + 1.2345678).max() <= 2**-11
    assert decoded[1].rollout_topk_log_probs is None


def test_decoded_arrays_can_be_written_to() -> None:
    encoded = encode_group(with_routes(4))
    columns = {name: np.frombuffer(column.tobytes(), column.dtype) for name, column in encoded.columns.items()}
    columns["routes"] = columns["routes"].reshape(3, 8, 2)
    routes = decode_group(encoded.header, columns)[0].rollout_routed_experts
    assert isinstance(routes, np.ndarray)
    routes[0, 0, 0] = 9


def test_a_removed_sample_is_stored_with_a_mask_of_zeros_and_comes_back_with_its_own() -> None:
    first, second = samples_of(7)
    first.remove_sample, first.loss_mask = True, [1, 0, 1]
    second.remove_sample = True
    encoded = encode_group([first, second])
    assert encoded.columns["loss_mask"].tolist() == [0] * 6
    assert summary_from_header(encoded.header).mask_sums == [0, 0]
    decoded = decode_group(encoded.header, encoded.columns)
    assert [sample.loss_mask for sample in decoded] == [[1, 0, 1], None]


def test_readers_of_tokens_need_no_fields_and_no_media() -> None:
    """Texts and images are columns of their own, so the header that every reader parses stays small."""
    samples = samples_of(7)
    samples[0].response = "x" * 100_000
    samples[0].multimodal_inputs = {"images": [np.zeros((64, 64, 3), np.uint8)]}
    encoded = encode_group(samples)
    assert len(encoded.header) < 2000
    assert len(encoded.columns["fields"]) < 110_000
    assert len(encoded.columns["multimodal_inputs"]) > 64 * 64 * 3


@pytest.mark.parametrize("copied", [False, True])
def test_media_that_members_share_are_stored_once(copied: bool) -> None:
    picture, other = np.full((64, 64), 7, np.uint8), np.full((64, 64), 9, np.uint8)
    samples = [*samples_of(7), *samples_of(7), *samples_of(7)]
    for sample, media in zip(samples, [None, picture, other, picture, None, other], strict=True):
        sample.multimodal_inputs = None if media is None else {"image": media.copy() if copied else media}
    encoded = encode_group(samples)
    assert 2 * picture.nbytes < len(encoded.columns["multimodal_inputs"]) < 2 * picture.nbytes + 500
    found = [sample.multimodal_inputs for sample in decode_group(encoded.header, encoded.columns)]
    assert [None if media is None else int(media["image"][0, 0]) for media in found] == [None, 7, 9, 7, None, 9]


def test_media_that_are_those_of_no_member_before_are_refused() -> None:
    samples = samples_of(7)
    for sample in samples:
        sample.multimodal_inputs = {"image": np.zeros(100, np.uint8)}
    encoded = encode_group(samples)
    for number in (b"\x01", b"\x09", b"\xff", b"\xc1"):
        damaged = np.frombuffer(encoded.columns["multimodal_inputs"][:-1].tobytes() + number, np.uint8)
        with pytest.raises(CorruptDataError, match=r"allowed: a member before|media can't be read"):
            decode_group(encoded.header, {**encoded.columns, "multimodal_inputs": damaged})


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
        ({"a": {"b": np.str_("x")}}, r"metadata.a.b: a value of type numpy.str_ can't be stored"),
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
        ({"rollout_log_probs": [-0.5, "-1", -0.5]}, r"rollout_log_probs\[1\] is '-1', allowed: float or int"),
        ({"teacher_log_probs": [-0.5]}, r"teacher_log_probs has 1 entries, allowed: 3"),
        ({"rollout_topk_token_ids": [[1, 2], [3]]}, r"rollout_topk_token_ids can't be read"),
        ({"rollout_topk_token_ids": np.zeros(3, np.int32)}, r"int32 with 1 axes, allowed: integers with 2"),
        ({"rollout_topk_token_ids": np.full((3, 1), 2**31)}, r"runs from 2147483648 to 2147483648, allowed: 0 to 2"),
        ({"rollout_topk_log_probs": np.full((3, 1), "x")}, r"<U1 with 2 axes, allowed: floats with 2"),
        ({"rollout_routed_experts": np.zeros((4, 2))}, r"chunk 0 of rollout_routed_experts is float64 \[4, 2\]"),
        ({"rollout_routed_experts": []}, r"rollout_routed_experts is an empty list"),
        ({"rollout_routed_experts": np.full((4, 1, 1), -1)}, r"negative expert ids"),
        (
            {"rollout_routed_experts": np.full((4, 1, 1), 65536)},
            r"ids up to 65536 of None experts, allowed: up to 65536",
        ),
        ({"index": None}, r"member 0 of group 7 has no index"),
        ({"group_index": 8}, r"member 1 has group_index 7, allowed: 8"),
        ({"reward": {"math": 1.0}}, r"reward is a dict with keys \['math'\], and the reward key is None"),
    ],
)
def test_a_field_that_breaks_the_contract_is_refused(changes: dict[str, Any], message: str) -> None:
    first, second = samples_of(7)
    with pytest.raises(SampleError, match=message):
        encode_group([dataclasses.replace(first, **changes), second])


def test_members_whose_rows_have_different_shapes_are_refused() -> None:
    samples = with_routes(4)
    samples[1].rollout_routed_experts = np.zeros((4, 3, 5), np.uint8)
    with pytest.raises(
        SampleError, match=r"sample 15 of group 7: rows of routes have shape \[3, 5\], allowed: \[3, 2\]"
    ):
        encode_group(samples)


def test_a_candidate_that_float16_cannot_hold_is_refused() -> None:
    samples = samples_of(7)
    samples[1].rollout_topk_log_probs = np.full((3, 1), -70000.0, np.float32)
    with pytest.raises(SampleError, match=r"sample 15 .* rollout_topk_log_probs\[0\] is -70000.0, beyond float16"):
        encode_group(samples, sc_dtype="float16")
    encode_group(samples, sc_dtype="float32")


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
    with pytest.raises(SchemaVersionError, match="schema version 3, this code reads up to 2"):
        read_header(header)


def test_damaged_headers_and_columns_are_refused() -> None:
    encoded = encode_group(samples_of(7))
    for header in (b"", b"junk", encoded.header[:-1]):
        with pytest.raises(CorruptDataError, match="header"):
            decode_group(header, encoded.columns)
    with pytest.raises(CorruptDataError, match="have no 'loss_mask'"):
        decode_group(encoded.header, {"tokens": encoded.columns["tokens"]})
    with pytest.raises(CorruptDataError, match="has 9 rows"):
        decode_group(encoded.header, {**encoded.columns, "tokens": encoded.columns["tokens"][:-1]})
    for fields in (b"\xc1", msgspec.msgpack.encode({"status": "sleeping"}), msgspec.msgpack.encode(7)):
        with pytest.raises(CorruptDataError, match="fields of a sample can't be read"):
            decode_group(encoded.header, {**encoded.columns, "fields": pad(fields, encoded.columns["fields"])})


def pad(fields: bytes, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column of the same length that begins with other bytes."""
    return np.frombuffer(fields.ljust(len(column), b"\xc1")[: len(column)], np.uint8)
