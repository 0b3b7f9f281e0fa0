"""The prompts of evaluation data sets, and the samples that they become."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from vime.data.cursor import PromptCursor
from vime.data.prompts import PromptLimit, PromptSource
from vime.errors import BadRecordError, DataError
from vime.rollout.prompt_text import PromptText
from vime.rollout.request_seed import request_seed
from vime.rollout.sampling import SamplingSettings
from vime.rollout.tokenizer import load_tokenizer
from vime.settings.groups import Settings
from vime.settings.schemas.eval_config import EvalDataset
from vime.settings.schemas.eval_sets import evaluation_sets
from vime.utils.types import Sample


@dataclass(frozen=True)
class EvalSet:
    """One data set, its prompts opened."""

    options: EvalDataset
    source: PromptSource

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def num_attempts(self) -> int:
        """Answers to each prompt."""
        return self.options.n_samples_per_eval_prompt or 1

    def samples(self) -> Iterator[tuple[Sample, str]]:
        """A fresh sample for each attempt at each prompt, in order, with the place of its prompt.

        `index` counts the data set's samples and `group_index` its prompts, so that both, and the seeds made of them,
        are the same in every evaluation.
        """
        tasks, _ = self.source.take(PromptCursor(), len(self.source))
        for task in tasks:
            for attempt in range(self.num_attempts):
                sample = Sample(
                    group_index=task.group_index,
                    index=task.group_index * self.num_attempts + attempt,
                    prompt=task.prompt,
                    label=task.label,
                    metadata=copy.deepcopy({**task.metadata, **self.options.metadata_overrides}),
                    multimodal_inputs=copy.deepcopy(task.media) or None,
                    generate_function_path=self.options.custom_generate_function_path,
                    session_id=uuid.uuid4().hex,
                )
                yield sample, self.source.where(task.row)


def open_eval_sets(settings: Settings) -> list[EvalSet]:
    """The run's evaluation data sets; empty when it has none.

    Raises:
        DataError: one can't be used, or the tokenizer that counts its tokens can't be loaded.
        SettingsError: --eval-config can't be read.
    """
    sets = evaluation_sets(settings)
    if not sets:
        return []
    text = _prompt_text(settings) if any(_most_tokens(options) for options in sets) else None
    return [open_eval_set(options, settings, text) for options in sets]


def open_eval_set(options: EvalDataset, settings: Settings, text: PromptText | None) -> EvalSet:
    """Open the prompts of a data set; prompts that are too long, and bad ones, are dealt with as those of training.

    `text` counts the tokens of prompts, where the data set limits them.

    Raises:
        DataError: it can't be used; the message names the data set.
    """
    data = settings.data
    try:
        source = PromptSource(
            options.path,
            input_key=options.input_key or data.input_key,
            label_key=options.label_key,
            metadata_key=options.metadata_key,
            tool_key=options.tool_key,
            media_keys=data.multimodal_keys,
            limit=_limit(options, text),
            n_samples_per_prompt=options.n_samples_per_eval_prompt or 1,
            on_bad_record="skip" if data.bad_prompt_records == "skip" else "stop",
            max_bad_fraction=settings.rollout.rollout_max_failed_fraction,
        )
    except DataError as error:
        kind = BadRecordError if isinstance(error, BadRecordError) else DataError
        raise kind(
            f"evaluation data set {options.name}: {error.message}",
            next_step="Correct the file, or the data set's own options in --eval-prompt-data or --eval-config.",
        ) from error
    return EvalSet(options, source)


def set_aside_words(eval_set: EvalSet) -> list[str]:
    """What to tell of records that are left out; empty when there are none."""
    source = eval_set.source
    left_out = {"bad": source.bad_records, "too long": source.long_records}
    return [
        f"Evaluation data set {eval_set.name}: {len(records)} of {source.num_records} records are {kind} and are left "
        f"out. The first: {records[0].message}"
        for kind, records in left_out.items()
        if records
    ]


def eval_sampling(options: EvalDataset, settings: Settings, seed: int | None) -> SamplingSettings:
    """How the responses of a data set are drawn; with `seed` the same in every evaluation."""
    rollout = settings.rollout
    return SamplingSettings(
        options.max_response_len or 1,
        rollout.rollout_temperature if options.temperature is None else options.temperature,
        top_p=options.top_p or 1.0,
        top_k=options.top_k or -1,
        min_response_tokens=options.min_new_tokens or 0,
        seed=None if seed is None else request_seed(seed, "evaluation", options.name),
        stop=tuple(options.stop or ()),
        stop_token_ids=tuple(options.stop_token_ids or ()),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
        max_context_tokens=options.max_context_len,
    )


def _limit(options: EvalDataset, text: PromptText | None) -> PromptLimit | None:
    most = _most_tokens(options)
    return None if most is None or text is None else PromptLimit(most, text.count_tokens)


def _most_tokens(options: EvalDataset) -> int | None:
    """Of a prompt: its own limit, else what the context leaves beside one token of response."""
    if options.max_prompt_len is None and options.max_context_len is not None:
        return options.max_context_len - 1
    return options.max_prompt_len


def _prompt_text(settings: Settings) -> PromptText:
    """How prompts are rendered, to count their tokens."""
    data, tokenizer = settings.data, load_tokenizer(settings.checkpoint.hf_checkpoint)
    return PromptText(
        tokenizer, apply_chat_template=data.apply_chat_template, template_kwargs=data.apply_chat_template_kwargs
    )
