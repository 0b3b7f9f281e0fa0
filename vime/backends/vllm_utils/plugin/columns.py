"""Columns of sampled tokens: what a request may ask for, and what it gets. Numpy and msgspec only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

OPTION = "vime_columns"
"""Key of a request's `SamplingParams.extra_args` that asks for columns; its value is a `ColumnRequest` as a dict."""


class ColumnRequest(msgspec.Struct, frozen=True):
    """What a request wants back besides its tokens and their log-probabilities."""

    num_candidates: int = 0
    """Most probable tokens at each position."""
    routes_from: int | None = None
    """First row of the experts that were chosen for each token; None leaves routes out."""
    nucleus: bool = False
    """Every token that top-p and top-k left to sample from."""


def column_request(sampling_params: Any) -> ColumnRequest | None:
    """What the parameters of a request ask for; None when they ask for no columns."""
    extra = sampling_params.extra_args if sampling_params is not None else None
    return msgspec.convert(extra[OPTION], ColumnRequest) if extra and OPTION in extra else None


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
