"""The configuration of the model that a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.settings.groups import Settings


def model_config(settings: Settings) -> dict[str, Any]:
    """`config.json` of --hf-checkpoint, of the family that --model-name says. Raises as `read_hf_config`."""
    return read_hf_config(Path(settings.checkpoint.hf_checkpoint or ""), settings.checkpoint.model_name)
