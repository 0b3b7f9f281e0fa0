"""What the trainer made of each token it trained: a file for each rollout batch and data-parallel rank.

`token_log/<rollout>/<branch>_<rank>.safetensors` holds, for S samples with R response tokens end to end,
`sample_indices` int64 [S], `offsets` int64 [S + 1], `mean_gaps` float32 [S], `log_probs` float32 [R] and, where tokens
of one sample differ in them, `advantages` float32 [R]; see `TrainedTokens`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pipeline.planner import BatchPlan
from storage.files import make_folder, write_atomically
from storage.os_errors import os_error
from vime.data.trained_tokens import TrainedTokens
from vime.errors import CorruptDataError

VERSION = "1"


def write_token_log(folder: Path, rank: int, plan: BatchPlan, samples: Mapping[int, TrainedTokens]) -> None:
    """Write what data-parallel rank `rank` trained of a batch, by `Sample.index`; durable when it returns."""
    path = _path(folder, plan.branch, plan.rollout_id, rank)
    tokens = [samples[index] for index in sorted(samples)]
    columns = {
        "sample_indices": np.array(sorted(samples), np.int64),
        "offsets": np.cumsum([0, *(len(sample.log_probs) for sample in tokens)], dtype=np.int64),
        "mean_gaps": np.array([sample.mean_gap for sample in tokens], np.float32),
        "log_probs": _joined([sample.log_probs for sample in tokens]),
    }
    if any(len(sample.advantages) and np.ptp(sample.advantages) for sample in tokens):
        columns["advantages"] = _joined([sample.advantages for sample in tokens])
    make_folder(path.parent)
    write_atomically(path, save(columns, {"version": VERSION}))


def read_trained_tokens(
    folder: Path, branch: str, rollout_id: int, rank: int, sample_index: int, advantage: float
) -> TrainedTokens | None:
    """The tokens of one sample, or None where they are not there (any more). `advantage` is that of the plan.

    Raises `CorruptDataError` for a damaged file.
    """
    with suppress(FileNotFoundError):
        return _read_tokens(_path(folder, branch, rollout_id, rank), sample_index, advantage)
    return None


def read_mean_gaps(folder: Path, branch: str, rollout_id: int) -> dict[int, float]:
    """`Sample.index` -> `TrainedTokens.mean_gap` in a batch, of all ranks. Raises `CorruptDataError`."""
    gaps: dict[int, float] = {}
    for path in sorted((folder / str(rollout_id)).glob(f"{branch}_*.safetensors")):
        with suppress(FileNotFoundError), _opened(path) as file:  # it may be removed meanwhile
            samples, means = file.get_tensor("sample_indices").tolist(), file.get_tensor("mean_gaps").tolist()
            gaps |= zip(samples, means, strict=True)
    return gaps


def remove_token_logs(folder: Path, last_rollout: int | None) -> None:
    """Remove what is kept of the batches up to `last_rollout`, of all branches; None: none. Raises `StorageError`."""
    if last_rollout is None:
        return
    for batch in folder.glob("*"):
        if batch.name.isdigit() and int(batch.name) <= last_rollout:
            try:
                shutil.rmtree(batch)
            except OSError as error:
                raise os_error(error, batch, 0) from error


def _path(folder: Path, branch: str, rollout_id: int, rank: int) -> Path:
    return folder / str(rollout_id) / f"{branch}_{rank}.safetensors"


def _read_tokens(path: Path, sample_index: int, advantage: float) -> TrainedTokens | None:
    with _opened(path) as file:
        (found,) = np.nonzero(file.get_tensor("sample_indices") == sample_index)
        if not len(found):
            return None
        member = int(found[0])
        start, stop = file.get_tensor("offsets")[member : member + 2].tolist()
        log_probs = file.get_slice("log_probs")[start:stop]
        return TrainedTokens(
            log_probs=log_probs,
            advantages=file.get_slice("advantages")[start:stop]
            if "advantages" in file.keys()  # noqa: SIM118 - it is no dict
            else np.full_like(log_probs, advantage),
            mean_gap=float(file.get_tensor("mean_gaps")[member]),
        )


def _joined(arrays: list[Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([np.zeros(0, np.float32), *arrays])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Raises `CorruptDataError` for a damaged file and `FileNotFoundError` for none."""
    try:
        with safe_open(path, framework="np") as file:
            version = (file.metadata() or {}).get("version")
            if version != VERSION:
                raise CorruptDataError(f"{path}: version {version!r}, allowed: {VERSION!r}.")
            yield file
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError) and not path.exists():
            raise
        raise CorruptDataError(
            f"{path}: {error}.", next_step="Remove the file; only what the trainer made of its tokens is lost."
        ) from error
