"""The first weights of a critic: those of a language model or of another critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.megatron_utils import hf_weights, value_head
from vime.backends.megatron_utils.checkpoint import TRACKER, checkpoint_folder
from vime.backends.megatron_utils.optimizer import Learner
from vime.errors import ModelError

_HEAD = (f"{value_head.NAME}.weight", f"{value_head.NAME}.bias")


def load_initial_weights(learner: Learner, source: Path, hf_config: Mapping[str, Any]) -> None:
    """Fill a value model's weights, without any optimizer state; collective.

    `source` is a Hugging Face folder, a folder of Megatron's checkpoints with a tracker file, or one checkpoint. The
    value head is loaded from the checkpoint of a critic and kept as it is otherwise. Raises `ModelError`.
    """
    if (source / "config.json").is_file():
        hf_weights.load_hf_weights(learner.chunks, source, hf_config, apart=_HEAD)
    else:
        _load_megatron(learner, _checkpoint_in(source))
    learner.optimizer.reload_model_params()


def _checkpoint_in(source: Path) -> Path:
    tracker = source / TRACKER
    folder = source
    if tracker.is_file():
        text = tracker.read_text().strip()
        folder = checkpoint_folder(source, int(text)) if text.isdecimal() else source / text
    if not (folder / "metadata.json").is_file():
        raise ModelError(
            f"{folder}: neither config.json nor metadata.json there, allowed: a Hugging Face folder or a checkpoint of "
            "Megatron's.",
            next_step="Correct the critic's load in --megatron-config-path.",
        )
    return folder


def _load_megatron(learner: Learner, folder: Path) -> None:
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names = ["model" if len(learner.chunks) == 1 else f"model{number}" for number in range(len(learner.chunks))]
    request = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, learner.chunks, strict=True)
    }
    saved = dist_checkpointing.load_tensors_metadata(str(folder))
    apart = () if _HEAD[1] in saved else _HEAD  # a language model's head has no bias
    for part in request.values():
        for name in apart:
            part.pop(name, None)
    try:
        state = dist_checkpointing.load(request, str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ModelError(
            f"{folder} can't be loaded into the critic: {error}",
            next_step="Name a checkpoint of a model of the same shape as the critic's load.",
        ) from error
    for name, chunk in zip(names, learner.chunks, strict=True):
        missing, unexpected = unwrap_model(chunk).load_state_dict(state[name], strict=False)
        if unexpected or set(missing) - set(apart):
            raise ModelError(f"{folder}: missing {sorted(set(missing) - set(apart))}, unexpected {sorted(unexpected)}.")
