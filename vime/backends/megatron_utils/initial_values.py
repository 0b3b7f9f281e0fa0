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
from vime.backends.megatron_utils.open_weights import open_weights
from vime.backends.megatron_utils.optimizer import Learner
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import ModelError

_HEAD = (f"{value_head.NAME}.weight", f"{value_head.NAME}.bias")


def load_initial_weights(learner: Learner, source: Path, hf_config: Mapping[str, Any]) -> None:
    """Fill a value model's weights, without any optimizer state; collective.

    `source` is a Hugging Face folder, a folder of Megatron's checkpoints with a tracker file, or one checkpoint. The
    value head is loaded from the checkpoint of a critic and kept as it is otherwise. Raises `ModelError` or
    `RestoreError`.
    """
    given = WeightSource("the critic's load", source)
    if not given.is_hugging_face and _is_critic(given.megatron_folder()):
        _load_megatron(learner, given.megatron_folder())
    else:
        with open_weights(given, hf_config) as reader:
            hf_weights.load_weights(learner.chunks, reader, hf_config, apart=_HEAD)
    learner.optimizer.reload_model_params()


def _is_critic(folder: Path) -> bool:
    """Whether a checkpoint has a value head, which has a bias, in place of a language model's, which has none."""
    dist_format = (folder / "metadata.json").is_file()
    return dist_format and _HEAD[1] in dist_checkpointing.load_tensors_metadata(str(folder))


def _load_megatron(learner: Learner, folder: Path) -> None:
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names = ["model" if len(learner.chunks) == 1 else f"model{number}" for number in range(len(learner.chunks))]
    request = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, learner.chunks, strict=True)
    }
    try:
        state = dist_checkpointing.load(request, str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ModelError(
            f"{folder} can't be loaded into the critic: {error}",
            next_step="Name a checkpoint of a model of the same shape as the critic's load.",
        ) from error
    for name, chunk in zip(names, learner.chunks, strict=True):
        unwrap_model(chunk).load_state_dict(state[name])
