"""Where the prompt stream stands, and what it hands out: plain structs and the order of an epoch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class PromptCursor(msgspec.Struct, frozen=True):
    """Position in the prompt stream; a pure function of how many groups were taken."""

    epoch: int = 0
    offset: int = 0
    """Prompts of this epoch already taken."""
    next_group_index: int = 0
    next_sample_index: int = 0


class PromptTask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that is to become one group of samples."""

    group_index: int
    first_sample_index: int
    """`Sample.index` of the group's first member; the others follow."""
    epoch: int
    row: int
    """Number of the record in its file, from 0."""
    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = {}
    media: dict[str, list[Any]] = {}
    """By kind, as the record holds them; becomes `Sample.multimodal_inputs`."""
    fields: dict[str, Any] = {}
    """Other attributes that the group's samples begin with, from a data source of the user's own."""


def epoch_order(num_rows: int, *, shuffle: bool, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[num_rows] order in which an epoch visits its rows.

    Rows are sorted by a hash of (seed, epoch, row), so the order doesn't depend on the versions of any library.
    """
    rows = np.arange(num_rows, dtype=np.int64)
    if not shuffle:
        return rows
    with np.errstate(over="ignore"):
        salt = _splitmix64(_splitmix64(np.uint64(seed % 2**64)) + np.uint64(epoch))
        return np.argsort(_splitmix64(rows.astype(np.uint64) + salt), kind="stable")


def _splitmix64(values: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection on 64-bit words."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
