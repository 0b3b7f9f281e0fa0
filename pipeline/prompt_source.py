"""The prompt source that the settings describe; loads no framework."""

from __future__ import annotations

from vime.data.prompts import PromptSource
from vime.settings.groups import Settings


def build_prompt_source(settings: Settings) -> PromptSource:
    """Open the prompt file.

    Raises:
        DataError: it can't be used.
    """
    data = settings.data
    return PromptSource(
        data.prompt_data or "",
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        n_samples_per_prompt=data.n_samples_per_prompt,
    )
