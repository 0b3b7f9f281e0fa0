"""Hugging Face checkpoints that a trainer writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from vime.backends.megatron_utils.new_folder import new_folder
from vime.backends.megatron_utils.safetensors_files import EXPORT, write_checkpoint


def write(weights: Iterable[tuple[str, torch.Tensor]], hf_checkpoint: Path, directory: Path) -> None:
    """Write `directory` whole or not at all, with configuration and tokenizer of `hf_checkpoint`.

    Raises:
        SettingsError: there is a folder that was not written here.
        DiskFullError: the disk became full.
    """
    with new_folder(directory, 0, replaces=EXPORT) as folder:
        write_checkpoint(weights, hf_checkpoint, folder)
        (folder / EXPORT).write_text(json.dumps({"configuration_of": str(hf_checkpoint)}))
