"""The prompt source that the settings describe; loads no framework unless prompts are limited in tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.custom_source import CustomPromptSource
from pipeline.run_folder import RunFolder
from vime.data.prompt_stream import PromptStream
from vime.data.prompts import PromptLimit, PromptSource
from vime.errors import DataError
from vime.rollout.hooks import load_hook
from vime.rollout.prompt_text import PromptText
from vime.rollout.tokenizer import load_tokenizer
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.resolve import Resolved
from vime.settings.rules.problem import Problem


def build_prompt_source(settings: Settings) -> PromptStream:
    """Open the prompt file, or make the user's own data source.

    Raises:
        DataError: it can't be used, or too many of its records can't; or a prompt can't be rendered to be counted.
    """
    data = settings.data
    if data.data_source_path is not None:
        return _custom_source(settings, data.data_source_path)
    return PromptSource(
        data.prompt_data or "",
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        media_keys=data.multimodal_keys,
        limit=_limit(settings),
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        n_samples_per_prompt=data.n_samples_per_prompt,
        on_bad_record="skip" if data.bad_prompt_records == "skip" else "stop",
        max_bad_fraction=settings.rollout.rollout_max_failed_fraction,
    )


def set_bad_prompts_aside(source: PromptStream, path: Path) -> list[str]:
    """Write the records that the source has skipped to `path`; what to tell, empty when there are none."""
    skipped = {"bad": source.bad_records, "too long": source.long_records}
    if any(skipped.values()):
        source.write_bad_records(path)
    return [
        f"{len(records)} of {source.num_records} prompt records are {kind} and were skipped; they are in {path}. "
        f"The first: {records[0].message}"
        for kind, records in skipped.items()
        if records
    ]


def with_num_rollout(resolved: Resolved, source: PromptStream) -> Resolved:
    """The settings with --num-rollout as --num-epoch makes it, where it was left out; else --num-epoch says nothing.

    Raises:
        DataError: an epoch is smaller than a rollout batch.
    """
    data = resolved.settings.data
    if data.num_epoch is None:
        return resolved
    if data.num_rollout is not None:
        return resolved.derive("--num-rollout", num_epoch=None)
    batch = data.rollout_batch_size or 1
    if len(source) < batch:
        raise DataError(
            f"--num-epoch counts rollout batches, but {len(source)} prompts fill none of --rollout-batch-size {batch}.",
            next_step="Give --num-rollout, or a smaller --rollout-batch-size.",
        )
    return resolved.derive("--num-epoch", num_rollout=data.num_epoch * (len(source) // batch))


def _limit(settings: Settings) -> PromptLimit | None:
    """Most tokens of a prompt: --rollout-max-prompt-len, else what the context leaves beside one token of response."""
    data, context = settings.data, settings.rollout.rollout_max_context_len
    most = context - 1 if data.rollout_max_prompt_len is None and context is not None else data.rollout_max_prompt_len
    if most is None:
        return None
    text = PromptText(
        load_tokenizer(settings.checkpoint.hf_checkpoint),
        apply_chat_template=data.apply_chat_template,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    return PromptLimit(most, text.count_tokens)


def _custom_source(settings: Settings, path: str) -> CustomPromptSource:
    made = load_hook("--data-source-path", path)
    if isinstance(made, Problem):
        raise DataError(str(made), next_step=made.next_step)
    return CustomPromptSource(
        partial(made, HookArgs(settings)),
        name=path,
        n_samples_per_prompt=settings.data.n_samples_per_prompt,
        state_folder=RunFolder.of(settings).root / "rollout",
    )
