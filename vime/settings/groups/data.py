"""Prompts and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.settings.checks import at_least, dotted_path, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class DataSettings:
    """Prompts and batch sizes."""

    prompt_data: str | None = flag(
        None,
        "Prompts: a .jsonl or .parquet file or fsspec URL, `path@[start:end]` for some of its rows; or tasks of "
        "reasoning-gym, `reasoning_gym:NAME?seed=0&size=500`, with what the task's own configuration has.",
        common=True,
        check=place,
    )
    bad_prompt_records: str = flag(
        "stop",
        "A malformed record of --prompt-data stops the run at its start, or is skipped: counted, and written to "
        "bad_prompts.jsonl in --save.",
        choices=("stop", "skip"),
    )
    data_source_path: str | None = flag(
        None,
        "Import path of your data source class, in place of --prompt-data: its `get_samples` gives groups of samples.",
        check=dotted_path,
    )
    input_key: str = flag("input", "Field of a record that holds the prompt.")
    label_key: str | None = flag(None, "Field of a record that holds the label.")
    metadata_key: str = flag("metadata", "Field of a record that holds metadata.")
    tool_key: str = flag("tools", "Field of a record that holds tool definitions for the chat template.")
    multimodal_keys: dict[str, Any] | None = flag(
        None, 'Fields of a record that hold media, by media type: {"image": "images"}.'
    )
    apply_chat_template: bool = flag(
        False, "Render the prompt through the tokenizer's chat template, as a chat model needs it."
    )
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "Arguments for the chat template.")
    rollout_shuffle: bool = flag(False, "Shuffle the prompts anew each epoch.")
    rollout_seed: int = flag(42, "Seed of the prompt order; epoch e uses seed + e.")
    rollout_max_prompt_len: int | None = flag(
        None,
        "Leave longer prompts out, in tokens; they are counted, and written to bad_prompts.jsonl in --save.",
        check=at_least(1),
    )
    num_rollout: int | None = flag(
        None,
        "Rollout batches to train in all, resumed ones included; 0 only evaluates.",
        check=at_least(0),
        common=True,
    )
    num_epoch: int | None = flag(None, "Passes over the prompts, when --num-rollout is left out.", check=at_least(1))
    rollout_batch_size: int | None = flag(None, "Prompt groups in one rollout batch.", check=at_least(1), common=True)
    n_samples_per_prompt: int = flag(1, "Samples generated for each prompt.", check=at_least(1), common=True)
    global_batch_size: int | None = flag(
        None, "Rollouts in one optimizer step; the whole rollout batch when left out.", check=at_least(1)
    )
    num_steps_per_rollout: int | None = flag(
        None, "Optimizer steps on one rollout batch, in place of --global-batch-size.", check=at_least(1)
    )
    over_sampling_batch_size: int | None = flag(
        None,
        "Groups generated for a batch that filters may thin out; the rollout batch size when left out.",
        check=at_least(1),
    )
    buffer_filter_path: str | None = flag(
        None, "Import path of `f(args, rollout_id, buffer, n)` that takes groups out of the buffer.", check=dotted_path
    )
    buffer_sort_by_staleness: bool = flag(
        False, "Take the groups of the oldest policy version out of the buffer first; straw always does."
    )
    loss_mask_type: str = flag(
        "qwen",
        "Chat format that tells which tokens of a conversation are trained in supervised fine-tuning.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
    )

    @property
    def rollouts_per_epoch(self) -> int | None:
        """Rollout batches of one pass over the prompts, where --num-epoch gave the run its length."""
        if self.num_epoch is None or self.num_rollout is None:
            return None
        return self.num_rollout // self.num_epoch

    @property
    def samples_per_rollout(self) -> int:
        return (self.rollout_batch_size or 0) * self.n_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        """Of --global-batch-size, or what --num-steps-per-rollout makes of a rollout batch."""
        if self.global_batch_size is None and self.num_steps_per_rollout is not None:
            return self.samples_per_rollout // self.num_steps_per_rollout
        return self.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        return self.samples_per_rollout // self.samples_per_step
