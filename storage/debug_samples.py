"""Samples as a `.pt` file of plain types and tensors, which torch loads with `weights_only=True`.

The file holds `{"rollout_id": int, "samples": [dict, ...]}`; a dict has the attributes of a `Sample` as `to_dict` gives
them. Arrays and images are tensors in it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from storage.arrays import is_tensor
from storage.columns import COLUMN_FIELDS
from storage.files import make_folder, write_atomically
from vime.errors import DataError
from vime.utils.types import Sample

_PLAIN = (bool, int, float, str, bytes)
_KEYS = {"rollout_id", "samples"}


def write_pt(path: Path, rollout_id: int, samples: Sequence[Sample]) -> None:
    """Write samples; the file is there whole or not at all, and replaces an earlier one.

    Raises `DataError` naming the sample and the path of a value that is neither plain nor an array.
    """
    rows = [plain(sample.to_dict(), f"sample {sample.index}") for sample in samples]
    write_plain(path, {"rollout_id": rollout_id, "samples": rows})


def write_plain(path: Path, content: dict[str, Any]) -> None:
    """Write plain types and tensors as a `.pt` file, whole or not at all."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    make_folder(path.parent)
    write_atomically(path, buffer.getvalue())


def read_pt(path: Path) -> list[Sample]:
    """The samples of a file that `write_pt` wrote. Loading runs no code of the file.

    Arrays of `Sample` come back as NumPy arrays, all others as tensors. Raises `DataError` for a file that is missing,
    no such file, or holds something that is no sample.
    """
    content = _load(path)
    if not isinstance(content, dict) or not content.keys() >= _KEYS or not isinstance(content["samples"], list):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise DataError(
            f"{path} holds {found}, allowed: a dict with {', '.join(sorted(_KEYS))} (a list of dicts).",
            next_step="Name a file that --save-debug-rollout-data or `RolloutArchive.export_pt` wrote.",
        )
    return [_sample(path, number, row) for number, row in enumerate(content["samples"])]


def plain(value: Any, path: str) -> Any:
    """`value` with arrays and images as tensors. Raises `DataError` for a value of another type."""
    import torch

    if value is None or type(value) in _PLAIN:
        return value
    if is_tensor(value):
        return value.detach().cpu().contiguous()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(value).copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PIL.Image.Image):
        return torch.from_numpy(np.asarray(value).copy())
    if isinstance(value, dict):
        return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item, f"{path}[{number}]") for number, item in enumerate(value))
    raise DataError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} can't be stored in a .pt file; "
        "allowed: None, numbers, text, bytes, lists, tuples, dicts, arrays, images, tensors.",
        next_step="Convert it in the function that makes it, or save a .straw.json archive.",
    )


def _load(path: Path) -> Any:
    import torch

    try:
        with path.open("rb") as file:
            is_archive = zipfile.is_zipfile(file)
        if not is_archive:  # the older format has a reader that fails in any way on damaged files
            raise ValueError("it is no file of torch.save")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}.", next_step="Check the path and its rollout's number.") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} can't be loaded as plain types and tensors: {reason}",
            next_step="Name a file that --save-debug-rollout-data wrote; restore it if it is damaged.",
        ) from error


def _sample(path: Path, number: int, row: Any) -> Sample:
    if not isinstance(row, dict):
        raise DataError(
            f"{path}: samples[{number}] is a {type(row).__name__}, allowed: a dict.", next_step="Remove it."
        )
    values = {
        name: value.numpy() if name in COLUMN_FIELDS.values() and is_tensor(value) else value
        for name, value in row.items()
    }
    try:
        return Sample.from_dict(values)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: samples[{number}] is no sample: {error}.", next_step="Correct the entry or leave it out."
        ) from error
