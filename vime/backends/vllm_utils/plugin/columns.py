"""Columns of one request on their way through an engine: rows wait in the core and travel to the API server in blocks.

vLLM sends three small arrays a request and step, and makes a dictionary of each row. Here a request's rows are appended
to one buffer, which is sent as one array of bytes every `ROWS_PER_BLOCK` tokens. Numpy and msgspec only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

OPTION = "vime_columns"
"""Key of a request's `SamplingParams.extra_args` that asks for columns; its value is a `ColumnRequest` as a dict."""

ROWS_PER_BLOCK = 64
_SPREAD = 37
"""First blocks are shorter by multiples of it, so that the requests of a batch don't all send in the same step."""


class ColumnRequest(msgspec.Struct, frozen=True):
    """What a request wants back besides its tokens and their log-probabilities."""

    num_candidates: int = 0
    """Most probable tokens at each position."""
    routes_from: int | None = None
    """First row of the experts that were chosen for each token; None leaves routes out."""
    nucleus: bool = False
    """Every token that top-p and top-k left to sample from."""
    rows_per_block: int = ROWS_PER_BLOCK


def column_request(sampling_params: Any) -> ColumnRequest | None:
    """What the parameters of a request ask for; None when they ask for no columns."""
    extra = sampling_params.extra_args if sampling_params is not None else None
    return msgspec.convert(extra[OPTION], ColumnRequest) if extra and OPTION in extra else None


class RouteRows(msgspec.Struct, frozen=True, array_like=True):
    """Experts of some consecutive tokens: an array [rows, L, K] of `dtype`."""

    dtype: str
    num_layers: int
    top_k: int
    data: bytes

    @classmethod
    def of(cls, rows: npt.NDArray[Any]) -> RouteRows:
        """From an array [rows, L, K]."""
        return cls(rows.dtype.str, rows.shape[1], rows.shape[2], rows.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(-1, self.num_layers, self.top_k)


@dataclass(frozen=True)
class Nuclei:
    """Of n positions each, the tokens that were left to sample from: ids int32 [N], offsets int64 [n + 1] and natural
    log-probabilities float32 [N], which sum to one at each position."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]

    def rows(self, start: int, stop: int) -> Nuclei:
        """Positions `start` to `stop`."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - first
        return Nuclei(self.ids[first:last], offsets, self.log_probs[first:last])


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Columns of some consecutive output tokens, as they travel."""

    rows: memoryview
    """int32 [n, 2 (k + 1)]: ids, then the bits of float32 log-probabilities; the sampled token, then the top k."""
    routes: RouteRows | None
    nucleus_ids: bytes
    nucleus_counts: bytes
    """int32 [n]"""
    nucleus_log_probs: bytes
    versions: list[tuple[str, int]]
    """Labels of the weights that made the rows, and how many rows each made, in order."""


@dataclass
class Pending:
    """What the core holds of one request until it is sent."""

    request: ColumnRequest
    row_bytes: int
    next_block_rows: int
    num_rows: int = 0
    rows: bytearray = field(default_factory=bytearray)
    routes: list[npt.NDArray[Any]] = field(default_factory=list)
    nuclei: list[Nuclei] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    num_labelled: int = 0
    """Rows that `versions` counts."""

    @classmethod
    def start(cls, request: ColumnRequest, number: int) -> Pending:
        """`number` counts the requests of an engine."""
        first = 1 + number * _SPREAD % request.rows_per_block
        return cls(request, row_bytes(request.num_candidates), first)

    @property
    def is_due(self) -> bool:
        return self.num_rows >= self.next_block_rows

    def label(self, version: str) -> None:
        """Say which weights made the rows since the last call."""
        if self.num_rows > self.num_labelled:
            self.versions.append((version, self.num_rows - self.num_labelled))
            self.num_labelled = self.num_rows

    def take(self, version: str) -> bytes | None:
        """Everything held, as an encoded `Block`; None when there is nothing. `version` is as in `label`."""
        if not self.num_rows and not self.routes:
            return None
        self.label(version)
        counts = [np.diff(nuclei.offsets).astype(np.int32) for nuclei in self.nuclei]
        block = Block(
            rows=memoryview(self.rows),
            routes=RouteRows.of(np.concatenate(self.routes)) if self.routes else None,
            nucleus_ids=b"".join(nuclei.ids.tobytes() for nuclei in self.nuclei),
            nucleus_counts=b"".join(count.tobytes() for count in counts),
            nucleus_log_probs=b"".join(nuclei.log_probs.tobytes() for nuclei in self.nuclei),
            versions=self.versions,
        )
        self.num_rows, self.num_labelled, self.next_block_rows = 0, 0, self.request.rows_per_block
        self.rows, self.routes, self.nuclei, self.versions = bytearray(), [], [], []
        return msgspec.msgpack.encode(block)


class StepRows:
    """Log-probabilities of one step of a batch; `Pending` buffers take their rows from it.

    ids int [n, w], log_probs float32 [n, w], with the sampled token first and then the most probable ones;
    `first_rows` tells the row of each request where one can have several.
    """

    def __init__(
        self,
        ids: npt.NDArray[Any],
        log_probs: npt.NDArray[Any],
        first_rows: Sequence[int] | None = None,
        nuclei: Nuclei | None = None,
    ) -> None:
        self._ids, self._log_probs = ids, log_probs
        self._first_rows, self._nuclei = first_rows, nuclei
        self._packed: dict[int, memoryview] = {}

    def add_to(self, pending: Pending, index: int, count: int) -> None:
        """Append the `count` rows of the batch's request `index`."""
        start = index if self._first_rows is None else self._first_rows[index]
        size, num_candidates = pending.row_bytes, pending.request.num_candidates
        packed = self._packed.get(num_candidates)
        if packed is None:
            packed = self._packed[num_candidates] = self._pack(num_candidates)
        pending.rows += packed[start * size : (start + count) * size]
        pending.num_rows += count
        if self._nuclei is not None and pending.request.nucleus:
            pending.nuclei.append(self._nuclei.rows(start, start + count))

    def _pack(self, num_candidates: int) -> memoryview:
        """Requests of a batch may want fewer candidates than the widest one."""
        width = num_candidates + 1
        rows = _packed_already(self._ids, self._log_probs) if width == self._ids.shape[1] else None
        if rows is None:
            rows = np.empty((len(self._ids), 2 * width), np.int32)
            rows[:, :width] = self._ids[:, :width]
            rows[:, width:] = np.ascontiguousarray(self._log_probs[:, :width], np.float32).view(np.int32)
        return rows.data.cast("B")


def _packed_already(ids: npt.NDArray[Any], log_probs: npt.NDArray[Any]) -> npt.NDArray[np.int32] | None:
    """Both as the int32 [n, 2 w] that they are halves of; None where they lie apart."""
    size = ids.shape[1] * ids.itemsize
    are_halves = (
        ids.dtype == np.int32
        and log_probs.dtype == np.float32
        and ids.strides == log_probs.strides == (2 * size, ids.itemsize)
        and log_probs.__array_interface__["data"][0] - ids.__array_interface__["data"][0] == size
    )
    return as_strided(ids, (len(ids), 2 * ids.shape[1]), writeable=False) if are_halves and len(ids) > 1 else None


@dataclass(frozen=True)
class Columns:
    """All columns of n output tokens; `routes` [rows, L, K] also cover the prompt, from row `routes_from` on."""

    sampled_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    candidate_ids: npt.NDArray[np.int32]
    candidate_log_probs: npt.NDArray[np.float32]
    routes: npt.NDArray[Any] | None
    nuclei: Nuclei | None
    versions: list[tuple[str, int]]
    """Labels of weights and the number of tokens that each made, in order."""

    def __len__(self) -> int:
        return len(self.sampled_ids)

    def head(self, num_tokens: int) -> Columns:
        """The first `num_tokens`, for an answer that was cut short; routes lose as many rows at their end."""
        cut = len(self) - num_tokens
        return Columns(
            self.sampled_ids[:num_tokens],
            self.log_probs[:num_tokens],
            self.candidate_ids[:num_tokens],
            self.candidate_log_probs[:num_tokens],
            None if self.routes is None else self.routes[: len(self.routes) - cut],
            None if self.nuclei is None else self.nuclei.rows(0, num_tokens),
            self.versions,
        )


class ReceivedColumns:
    """Columns of one request in the API server, which grow block by block, so that little is left to do at its end."""

    def __init__(self, request: ColumnRequest) -> None:
        self.request, self.num_rows = request, 0
        self.versions: list[tuple[str, int]] = []
        self._sampled_ids, self._log_probs = bytearray(), bytearray()
        self._candidate_ids, self._candidate_log_probs = bytearray(), bytearray()
        self._routes: list[npt.NDArray[Any]] = []
        self._nuclei: list[Block] = []

    def add(self, encoded: bytes | memoryview) -> None:
        """The next block; not after `columns`, whose arrays are of the same memory."""
        block = msgspec.msgpack.decode(encoded, type=Block)
        width = self.request.num_candidates + 1
        rows = np.frombuffer(block.rows, np.int32).reshape(-1, 2 * width)
        self.num_rows += len(rows)
        self._sampled_ids += _bytes(rows[:, 0])
        self._log_probs += _bytes(rows[:, width])
        if width > 1:
            self._candidate_ids += _bytes(rows[:, 1:width])
            self._candidate_log_probs += _bytes(rows[:, width + 1 :])
        if block.routes is not None:
            self._routes.append(block.routes.array())
        if self.request.nucleus:
            self._nuclei.append(block)
        _extend(self.versions, block.versions)

    def piece(self, start: int, stop: int) -> tuple[list[int], list[float], list[str]]:
        """Of some rows, the sampled tokens, their log-probabilities and the labels of the weights that made them."""
        labels = itertools.chain.from_iterable(itertools.repeat(label, count) for label, count in self.versions)
        return (
            np.frombuffer(self._sampled_ids, np.int32)[start:stop].tolist(),
            np.frombuffer(self._log_probs, np.float32)[start:stop].tolist(),
            list(itertools.islice(labels, start, stop)),
        )

    def columns(self) -> Columns:
        """Of all blocks so far."""
        shape = (self.num_rows, self.request.num_candidates)
        return Columns(
            sampled_ids=np.frombuffer(self._sampled_ids, np.int32),
            log_probs=np.frombuffer(self._log_probs, np.float32),
            candidate_ids=np.frombuffer(self._candidate_ids, np.int32).reshape(shape),
            candidate_log_probs=np.frombuffer(self._candidate_log_probs, np.float32).reshape(shape),
            routes=np.concatenate(self._routes) if self._routes else None,
            nuclei=_join_nuclei(self._nuclei) if self.request.nucleus else None,
            versions=self.versions,
        )


def _bytes(column: npt.NDArray[Any]) -> bytes:
    """`tobytes` alone takes ten times as long for a part of wider rows."""
    return np.ascontiguousarray(column).tobytes()


def row_bytes(num_candidates: int) -> int:
    """Bytes of one packed row."""
    return 8 * (num_candidates + 1)


def _join_nuclei(blocks: Sequence[Block]) -> Nuclei:
    counts = np.frombuffer(b"".join(block.nucleus_counts for block in blocks), np.int32)
    return Nuclei(
        np.frombuffer(b"".join(block.nucleus_ids for block in blocks), np.int32),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]),
        np.frombuffer(b"".join(block.nucleus_log_probs for block in blocks), np.float32),
    )


def _extend(versions: list[tuple[str, int]], more: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """`versions` with `more` appended in place, one entry for consecutive tokens of one label."""
    for label, count in more:
        if versions and versions[-1][0] == label:
            count += versions.pop()[1]
        versions.append((label, count))
    return versions
