"""A reader for the weights of a folder, whatever format it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.backends.megatron_utils.megatron_reader import TorchDistWeights, TorchWeights
from vime.backends.megatron_utils.weight_reader import HuggingFaceReader, WeightReader
from vime.backends.megatron_utils.weight_source import METADATA, MODEL_FILE, WeightSource, is_checkpoint
from vime.errors import RestoreError


def open_weights(source: WeightSource, hf_config: Mapping[str, Any]) -> WeightReader:
    """Open a Hugging Face folder, a Megatron checkpoint, or one iteration of a folder of them.

    Raises:
        RestoreError: there is no checkpoint.
        SettingsError: an iteration is asked for where there is none to choose.
        ModelError: files are absent or damaged.
    """
    source.refuse_unused_iteration()
    if source.is_hugging_face:
        return HuggingFaceReader(source.directory, hf_config)
    folder = source.megatron_folder()
    if (folder / METADATA).is_file():
        return TorchDistWeights(folder, hf_config)
    if is_checkpoint(folder):
        return TorchWeights(folder, hf_config)
    raise RestoreError(
        f"{source.flag}: {folder} holds neither {METADATA} (torch_dist) nor mp_rank_*/{MODEL_FILE} (torch).",
        next_step="Give the folder of a Hugging Face model or of Megatron checkpoints.",
    )
