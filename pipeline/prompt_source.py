"""The prompt source that the settings describe; loads no framework."""

from __future__ import annotations

from pathlib import Path

from vime.data.prompts import PromptSource
from vime.settings.groups import Settings


def build_prompt_source(settings: Settings) -> PromptSource:
    """Open the prompt file.

    Raises:
        DataError: it can't be used, or too many of its records can't.
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
        on_bad_record="skip" if data.bad_prompt_records == "skip" else "stop",
        max_bad_fraction=settings.rollout.rollout_max_failed_fraction,
    )


def set_bad_prompts_aside(source: PromptSource, path: Path) -> str | None:
    """Write the records that the source has skipped to `path`; what to tell, None when there are none."""
    if not source.bad_records:
        return None
    source.write_bad_records(path)
    return (
        f"{len(source.bad_records)} of {source.num_records} prompt records are bad and were skipped; they are in "
        f"{path}. The first: {source.bad_records[0].message}"
    )
