"""From a Hugging Face `config.json` to Megatron's shape flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import ModelError, reason_of
from vime.models.families import FAMILIES, named_config, num_experts
from vime.models.shape import shape_argv, shape_of_config
from vime.models.weight_names import NAMES, is_tied

__all__ = ["is_tied", "model_argv", "num_experts", "read_hf_config"]

_EXPERT_TRAINING = (
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"),
    *("--moe-aux-loss-coeff", "0", "--moe-router-dtype", "fp32"),
    # The selection bias of a family that has one stays as it was: it balances pre-training, not the policy.
    *("--moe-router-bias-update-rate", "0"),
)
"""How experts are trained here; the user's flags win."""


def read_hf_config(checkpoint: Path, model_name: str | None = None) -> dict[str, Any]:
    """Return the parsed `config.json` of a checkpoint folder; `ModelError` when it is absent or not JSON.

    With `model_name` it is that of the family so named, whatever `model_type` it has.
    """
    path = checkpoint / "config.json"
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist.", next_step="Point --hf-checkpoint at a Hugging Face model folder."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is no JSON that can be read: {reason_of(error)}.",
            next_step="Restore the file, or point --hf-checkpoint at another folder.",
        ) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds a {type(parsed).__name__}, allowed: an object.")
    return named_config(parsed, model_name)


def model_argv(hf_config: Mapping[str, Any]) -> list[str]:
    """Megatron flags that give a model the shape in `hf_config`; see `vime.models`.

    Raises `ModelError` naming the model type and the allowed ones, or the field that can't be represented.
    """
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, allowed: {', '.join(FAMILIES)}.",
            next_step="Choose a checkpoint of an allowed type.",
        )
    shape = shape_of_config(hf_config)
    argv = [*shape_argv(shape), "--seq-length", str(shape["--max-position-embeddings"])]
    return [*argv, *_EXPERT_TRAINING] if NAMES[model_type].expert_mlp else argv
