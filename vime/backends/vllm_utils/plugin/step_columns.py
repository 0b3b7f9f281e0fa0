"""Columns of one step of a batch, on their way from an engine's core to its API server. Numpy and msgspec only.

vLLM sends three small arrays a request and step, which costs its core more than all else that a step does for log-
probabilities. Here the rows of a step travel as the one array in which they came from the device, and the API server
finds each request's. So the core's work doesn't grow with the number of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vime.backends.vllm_utils.plugin.columns import Nuclei

NO_ROW = -1


class NucleusRows(msgspec.Struct, frozen=True, array_like=True):
    """`Nuclei`, as they travel."""

    ids: memoryview
    offsets: memoryview
    log_probs: memoryview

    @classmethod
    def of(cls, nuclei: Nuclei) -> NucleusRows:
        ids, offsets, log_probs = map(np.ascontiguousarray, (nuclei.ids, nuclei.offsets, nuclei.log_probs))
        return cls(ids.data, offsets.data, log_probs.data)

    def nuclei(self) -> Nuclei:
        return Nuclei(
            np.frombuffer(self.ids, np.int32),
            np.frombuffer(self.offsets, np.int64),
            np.frombuffer(self.log_probs, np.float32),
        )


class RouteRows(msgspec.Struct, frozen=True, array_like=True):
    """Experts of the tokens that each output of a step stands for: an array [rows, L, K] of `dtype`, output after
    output, and int32 [outputs] of how many rows each has."""

    dtype: str
    num_layers: int
    top_k: int
    data: memoryview
    counts: bytes

    @classmethod
    def of(cls, rows: Sequence[npt.NDArray[Any] | None]) -> RouteRows | None:
        """From an array [n, L, K] or None for each output; None when there is none at all."""
        found = [part for part in rows if part is not None]
        if not found:
            return None
        whole = np.concatenate(found)
        counts = np.array([0 if part is None else len(part) for part in rows], np.int32)
        return cls(whole.dtype.str, whole.shape[1], whole.shape[2], whole.data, counts.tobytes())

    def by_output(self) -> list[npt.NDArray[Any]]:
        """An array [n, L, K] for each output."""
        whole = np.frombuffer(self.data, self.dtype).reshape(-1, self.num_layers, self.top_k)
        stops = np.cumsum(np.frombuffer(self.counts, np.int32)).tolist()
        return [whole[start:stop] for start, stop in itertools.pairwise([0, *stops])]


class StepColumns(msgspec.Struct, frozen=True, array_like=True):
    """What travels beside the rows of a step."""

    version: str
    """Label of the weights that made the rows."""
    first_rows: bytes
    """int32 [outputs]: the row of each output's first token, `NO_ROW` for those that have no columns."""
    nuclei: NucleusRows | None = None
    """Of all rows."""
    routes: RouteRows | None = None

    def encode(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(_ENCODER.encode(self), np.uint8)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepColumns)


def pack_rows(ids: npt.NDArray[Any], log_probs: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Rows as they travel, int32 [n, 2 w]: ids, then the bits of float32 log-probabilities.

    Both are [n, w], the sampled token first and then the most probable ones. Nothing is copied where they are halves of
    such rows already.
    """
    found = _packed_already(ids, log_probs)
    if found is not None:
        return found
    width = ids.shape[1]
    rows = np.empty((len(ids), 2 * width), np.int32)
    rows[:, :width] = ids
    rows[:, width:] = np.ascontiguousarray(log_probs, np.float32).view(np.int32)
    return rows


def _packed_already(ids: npt.NDArray[Any], log_probs: npt.NDArray[Any]) -> npt.NDArray[np.int32] | None:
    whole = ids.base
    if not isinstance(whole, np.ndarray) or whole is not log_probs.base or not whole.flags.c_contiguous:
        return None
    (num_rows, width), size = ids.shape, 4 * ids.shape[1]
    start = ids.ctypes.data - whole.ctypes.data
    are_halves = (
        whole.dtype == ids.dtype == np.int32
        and log_probs.dtype == np.float32
        and ids.strides == log_probs.strides == (2 * size, 4)
        and log_probs.ctypes.data - ids.ctypes.data == size
    )
    first = start // 4
    return whole.reshape(-1)[first : first + 2 * num_rows * width].reshape(num_rows, 2 * width) if are_halves else None


class Places(NamedTuple):
    """Where the rows of a step's outputs are."""

    first_rows: bytes
    """As in `StepColumns`."""
    first: int | None
    """The first output that has columns."""


class RowPlaces:
    """Finds them, and remembers: most steps have the batch and the outputs of the step before."""

    def __init__(self) -> None:
        self._asked: tuple[list[str], list[str], Sequence[int] | None] | None = None
        self._found = Places(b"", None)

    def forget(self) -> None:
        """Other requests ask for columns than before."""
        self._asked = None

    def find(
        self,
        request_ids: list[str],
        batch: Sequence[str],
        places: Mapping[str, int],
        first_rows: Sequence[int] | None,
        wanted: Container[str],
    ) -> Places:
        """Of outputs of `request_ids`; `places` are those of requests in the batch, `first_rows` the row of each place
        where one can have several, and `wanted` are the requests that ask for columns."""
        asked = (request_ids, batch, first_rows)
        if asked != self._asked:
            found = [places.get(name, NO_ROW) if name in wanted else NO_ROW for name in request_ids]
            if first_rows is not None:
                found = [NO_ROW if place == NO_ROW else first_rows[place] for place in found]
            first = next((number for number, name in enumerate(request_ids) if name in wanted), None)
            self._found = Places(np.array(found, np.int32).tobytes(), first)
            self._asked = list(request_ids), list(batch), None if first_rows is None else list(first_rows)
        return self._found


class ReceivedStep:
    """One step in the API server."""

    def __init__(self, rows: npt.NDArray[np.int32], encoded: npt.NDArray[np.uint8]) -> None:
        """`rows` int32 [n, 2 w] are as `pack_rows` returns them, `encoded` is of `StepColumns.encode`."""
        columns = _DECODER.decode(encoded.data)
        self.version = columns.version
        self.width = rows.shape[1] // 2
        self.data: memoryview = rows.data.cast("B") if len(rows) else memoryview(b"")
        """Of the rows, of `8 w` bytes each."""
        self.first_rows: list[int] = np.frombuffer(columns.first_rows, np.int32).tolist()
        self.nuclei = None if columns.nuclei is None else columns.nuclei.nuclei()
        self.routes = None if columns.routes is None else columns.routes.by_output()
        self._rows = rows

    def cut(self, first: int, stop: int, width: int) -> bytes:
        """Some rows with `width` ids and log-probabilities, for a request that asked for fewer than others."""
        rows = self._rows[first:stop]
        return np.hstack([rows[:, :width], rows[:, self.width : self.width + width]]).tobytes()


class StepPart(NamedTuple):
    """What one output of a step brings."""

    step: ReceivedStep
    number: int
    """Of the output."""
    num_tokens: int

    def slice_request(self, _index: int, _num_positions: int) -> StepPart:
        """vLLM asks for it where a stop text leaves some of a step's tokens out; whole columns are cut at their end."""
        return self
