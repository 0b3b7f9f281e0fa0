"""Columns of one request in the API server. Numpy only."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.backends.vllm_utils.plugin.columns import ColumnRequest, Columns, Nuclei
from vime.backends.vllm_utils.plugin.step_columns import NO_ROW, ReceivedStep, StepPart

ROWS_AT_ONCE = 32
"""Rows wait as they came until there are so many, since cutting few into columns takes as long as cutting many."""


class ReceivedColumns:
    """They grow step by step, so that little is left to do at the end of a request."""

    def __init__(self, request: ColumnRequest) -> None:
        self.request, self.num_rows = request, 0
        self._width = request.num_candidates + 1
        self._rows, self._num_cut = bytearray(), 0
        self._sampled_ids, self._log_probs = bytearray(), bytearray()
        self._candidate_ids, self._candidate_log_probs = bytearray(), bytearray()
        self._routes = bytearray()
        self._route_dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._route_shape: tuple[int, ...] = ()
        self._nucleus_ids, self._nucleus_counts, self._nucleus_log_probs = bytearray(), bytearray(), bytearray()
        self._labels: list[tuple[str, int]] = []
        """Label and first row of rows that weights of one label made."""

    @property
    def versions(self) -> list[tuple[str, int]]:
        """Labels of weights and the number of rows that each made, in order."""
        ends = itertools.pairwise([*self._labels, ("", self.num_rows)])
        return [(label, stop - first) for (label, first), (_, stop) in ends]

    def add(self, part: StepPart) -> None:
        """What the next step brings; not after `columns`, whose arrays are of the same memory."""
        step, number, count = part
        first = step.first_rows[number]
        if count and first != NO_ROW:
            self._add_rows(step, first, first + count)
        if step.routes is not None and self.request.routes_from is not None:
            routes = step.routes[number]
            self._routes += routes.data
            self._route_dtype, self._route_shape = routes.dtype, routes.shape[1:]

    def _add_rows(self, step: ReceivedStep, first: int, stop: int) -> None:
        if not self._labels or step.version != self._labels[-1][0]:
            self._labels.append((step.version, self.num_rows))
        if step.width == self._width:
            size = 8 * step.width
            self._rows += step.data[first * size : stop * size]
        else:
            self._rows += step.cut(first, stop, self._width)
        self.num_rows += stop - first
        if self.request.nucleus and step.nuclei is not None:
            nuclei = step.nuclei.rows(first, stop)
            self._nucleus_ids += nuclei.ids.data
            self._nucleus_counts += np.diff(nuclei.offsets).astype(np.int32).data
            self._nucleus_log_probs += nuclei.log_probs.data
        if self.num_rows - self._num_cut >= ROWS_AT_ONCE:
            self._cut_rows()

    def _cut_rows(self) -> None:
        width = self._width
        rows = np.frombuffer(self._rows, np.int32).reshape(-1, 2 * width)
        self._sampled_ids += _bytes(rows[:, 0])
        self._log_probs += _bytes(rows[:, width])
        if width > 1:
            self._candidate_ids += _bytes(rows[:, 1:width])
            self._candidate_log_probs += _bytes(rows[:, width + 1 :])
        self._rows, self._num_cut = bytearray(), self.num_rows

    def piece(self, start: int, stop: int) -> tuple[list[int], list[float], list[str]]:
        """Of some rows, the sampled tokens, their log-probabilities and the labels of the weights that made them."""
        self._cut_rows()
        labels = itertools.chain.from_iterable(itertools.repeat(label, count) for label, count in self.versions)
        return (
            np.frombuffer(self._sampled_ids, np.int32)[start:stop].tolist(),
            np.frombuffer(self._log_probs, np.float32)[start:stop].tolist(),
            list(itertools.islice(labels, start, stop)),
        )

    def columns(self) -> Columns:
        """Of all steps so far."""
        self._cut_rows()
        shape = (self.num_rows, self.request.num_candidates)
        return Columns(
            sampled_ids=np.frombuffer(self._sampled_ids, np.int32),
            log_probs=np.frombuffer(self._log_probs, np.float32),
            candidate_ids=np.frombuffer(self._candidate_ids, np.int32).reshape(shape),
            candidate_log_probs=np.frombuffer(self._candidate_log_probs, np.float32).reshape(shape),
            routes=self._route_rows(),
            nuclei=self._nuclei() if self.request.nucleus else None,
            versions=self.versions,
        )

    def _route_rows(self) -> npt.NDArray[Any] | None:
        if not self._routes:
            return None
        return np.frombuffer(self._routes, self._route_dtype).reshape(-1, *self._route_shape)

    def _nuclei(self) -> Nuclei:
        counts = np.frombuffer(self._nucleus_counts, np.int32)
        return Nuclei(
            np.frombuffer(self._nucleus_ids, np.int32),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]),
            np.frombuffer(self._nucleus_log_probs, np.float32),
        )


def _bytes(column: npt.NDArray[Any]) -> bytes:
    """`tobytes` alone takes ten times as long for a part of wider rows."""
    return np.ascontiguousarray(column).tobytes()
