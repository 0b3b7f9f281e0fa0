"""Groups as large as those of a MoE run with routes and sampler heads, with made-up content."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from storage.columns import Array, ColumnSpec, EncodedGroup, encode_group
from storage.refs import Lease
from vime.utils.types import Sample

PROMPT_TOKENS = 8


@dataclass(frozen=True)
class GroupShape:
    """What a group is made of; `num_layers` 0: no routes, `head` 0: no sampler heads."""

    num_samples: int = 8
    num_tokens: int = 8192
    """Of one sample, prompt included."""
    num_layers: int = 48
    top_k: int = 8
    head: int = 128
    """Candidates of each response token."""

    @property
    def num_responses(self) -> int:
        return self.num_tokens - PROMPT_TOKENS


def wide_group(shape: GroupShape, group_index: int = 0) -> EncodedGroup:
    """A group with routes uint8 [L, rows, K] and heads (int32 ids, float16 log-probabilities) [rows, head]."""
    rng = np.random.default_rng(group_index)
    group = encode_group([_sample(shape, group_index, member) for member in range(shape.num_samples)])
    extra: dict[str, Array] = {}
    specs: list[ColumnSpec] = []
    if shape.head:
        rows = shape.num_samples * shape.num_responses
        extra["top_k_ids"] = rng.integers(0, 150_000, (rows, shape.head), np.int32)
        extra["top_k_log_probs"] = -rng.random((rows, shape.head), np.float32).astype(np.float16)
        specs += [_spec(name, extra[name], shape, shape.num_responses) for name in ("top_k_ids", "top_k_log_probs")]
    if shape.num_layers:
        rows = shape.num_samples * (shape.num_tokens - 1)
        extra["routes"] = rng.integers(0, 256, (shape.num_layers, rows, shape.top_k), np.uint8)
        specs.append(_spec("routes", extra["routes"], shape, shape.num_tokens - 1))
    header = msgspec.msgpack.decode(group.header)
    header["columns"] += specs
    return EncodedGroup(msgspec.msgpack.encode(header), {**group.columns, **extra})


def lease_bytes(group_index: int = 0) -> bytes:
    """A lease for a group, of no queue."""
    return msgspec.msgpack.encode(Lease("bench", "bench", f"group:{group_index}", f"{group_index}", 1, "", "", "bench"))


def _spec(name: str, array: Array, shape: GroupShape, rows: int) -> ColumnSpec:
    offsets = [member * rows for member in range(shape.num_samples + 1)]
    layout = "layer_major" if name == "routes" else "row_major"
    return ColumnSpec(name, str(array.dtype), list(array.shape), offsets, layout=layout)


def _sample(shape: GroupShape, group_index: int, member: int) -> Sample:
    return Sample(
        group_index=group_index,
        index=group_index * shape.num_samples + member,
        tokens=list(range(shape.num_tokens)),
        response_length=shape.num_responses,
        rollout_log_probs=[-0.5 - member] * shape.num_responses,
        version_spans=[(1, 0, shape.num_responses)],
        reward=1.0,
        status=Sample.Status.COMPLETED,
    )
