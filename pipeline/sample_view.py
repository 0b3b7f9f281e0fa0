"""One sample as it is stored, for `vime sample show`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipeline.lineage import PlannedStep, group_of_sample, planned_steps, state_words
from pipeline.prompt_places import PromptPlace, prompt_places, read_prompts
from pipeline.token_log import read_trained_tokens
from recovery.branch_line import BranchLine
from recovery.run_location import RunLocation
from storage.columns import decode_group, read_header
from storage.dead_letters import DeadLetter, read_letters
from storage.plain_json import to_plain_json
from storage.pool import Pool
from storage.queue_view import QueueView
from vime.data.trained_tokens import TrainedTokens
from vime.errors import CorruptDataError, NoRunError
from vime.utils.types import Sample

TokenText = Callable[[int], str]
"""The text of one token id."""


class TokenView(msgspec.Struct, frozen=True):
    """One token of a sample."""

    position: int
    """In the whole sequence, prompt included."""
    token_id: int
    text: str | None
    """None without a tokenizer."""
    version: int | None
    """Policy version that sampled it; None for the prompt and for tokens that were not sampled."""
    log_prob: float | None
    """Natural log under that policy; None for the prompt."""
    trained: bool
    """Whether it counts in the loss."""
    trainer_log_prob: float | None
    """Natural log under the weights that the step which trained it began with; None where that is not stored."""
    gap: float | None
    """`trainer_log_prob` - `log_prob` of a token that was sampled."""
    advantage: float | None
    """None where it was not planned or doesn't count in the loss."""


class ColumnView(msgspec.Struct, frozen=True):
    """One stored column of the sample's group."""

    name: str
    dtype: str
    shape: list[int]


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """`vime sample show RUN ID`."""

    sample_index: int
    group_index: int
    member: int
    source: str
    """"accepted", or the dead letter that it was found in."""
    state: str
    """Of its group: pending, trained, dropped, ..."""
    place: PromptPlace | None
    prompt: Any
    label: Any
    status: str
    reward: Any
    reward_parts: dict[str, float]
    """Where the reward is a dict: its numbers."""
    response: str
    prompt_length: int
    response_length: int
    trained_length: int
    """Response tokens that count in the loss."""
    version_spans: list[tuple[int, int, int]]
    """(policy version, start, stop) over response positions."""
    training: PlannedStep | None
    """The optimizer step that counts; None where there is none (yet)."""
    mean_gap: float | None
    """Mean |gap| of its trained tokens; None where the trainer's log-probabilities are not stored."""
    problem: str
    """Why they can't be read, where they are damaged."""
    metadata: Any
    non_generation_time_s: float
    columns: list[ColumnView]
    tokens: list[TokenView]


def show_sample(location: RunLocation, sample_index: int, token_text: TokenText | None) -> SampleView:
    """A sample that was accepted, or else its newest dead letter.

    Raises `StorageError` where its payload is gone, and `NoRunError` when it is neither accepted nor has a letter.
    """
    view = QueueView(location.pool)
    group = group_of_sample(view, sample_index)
    letter = None if group.result_ref is not None else _letter(location, sample_index)
    ref = letter.payload_ref if letter is not None else group.result_ref
    if ref is None:
        raise NoRunError(
            f"Sample {sample_index} is of group {group.group_index}, which is {group.state}"
            + (": nothing of it is stored." if letter is None else "; its dead letter holds it as JSON."),
            next_step="" if letter is None else f"`vime queue dead RUN --group {group.group_index} --json` prints it.",
        )
    line = BranchLine(location.root, view.control_dir)
    with Pool.open(location.pool) as pool:
        prompts = read_prompts(pool, [group])
        stored = pool.read_group(ref)
        planned = [step for step in planned_steps(pool, line, group.position, sample_index) if step.counts]
    samples = decode_group(stored.header, stored.columns)
    member = next((n for n, sample in enumerate(samples) if sample.index == sample_index), None)
    if member is None:
        raise NoRunError(
            f"Group {group.group_index} holds samples {[sample.index for sample in samples]}, not {sample_index}.",
            next_step="Give one of these.",
        )
    sample, training = samples[member], planned[-1] if planned else None
    trained, problem = _trained_tokens(location, training, sample_index)
    return SampleView(
        sample_index=sample_index,
        group_index=group.group_index,
        member=member,
        source="accepted" if letter is None else f"dead letter {letter.letter_id[:8]} ({letter.reason})",
        state=state_words(group, line),
        place=prompt_places(location, prompts.values()).get(group.group_index),
        prompt=to_plain_json(sample.prompt),
        label=to_plain_json(sample.label),
        status=sample.status.value,
        reward=to_plain_json(sample.reward),
        reward_parts=dict(sample.reward) if isinstance(sample.reward, dict) else {},
        response=sample.response,
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        trained_length=sample.effective_response_length,
        version_spans=sample.version_spans,
        training=training,
        mean_gap=None if trained is None else trained.mean_gap,
        problem=problem,
        metadata=to_plain_json(sample.metadata),
        non_generation_time_s=sample.non_generation_time,
        columns=[ColumnView(spec.name, spec.dtype, spec.shape) for spec in read_header(stored.header).columns],
        tokens=_tokens(sample, token_text, training, trained),
    )


def _letter(location: RunLocation, sample_index: int) -> DeadLetter | None:
    """The newest letter about a sample, one with a stored payload if there is any."""
    about = [letter for letter in read_letters(location.dead_letters)[0] if sample_index in letter.sample_indices]
    return next((letter for letter in reversed(about) if letter.payload_ref is not None), about[-1] if about else None)


def _trained_tokens(
    location: RunLocation, training: PlannedStep | None, sample_index: int
) -> tuple[TrainedTokens | None, str]:
    """(what the trainer made of the sample, why that can't be read)."""
    if training is None:
        return None, ""
    try:
        return (
            read_trained_tokens(
                location.token_log,
                training.branch,
                training.rollout_id,
                training.rank,
                sample_index,
                training.advantage,
            ),
            "",
        )
    except CorruptDataError as error:
        return None, str(error)


def _tokens(
    sample: Sample, token_text: TokenText | None, training: PlannedStep | None, trained: TrainedTokens | None
) -> list[TokenView]:
    start = sample.prompt_length
    mask: Sequence[int] = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    version_at = {p: version for version, first, stop in sample.version_spans for p in range(first, stop)}
    views = []
    for position, token_id in enumerate(sample.tokens):
        response = position - start
        log_probs = sample.rollout_log_probs if response >= 0 else None
        log_prob = None if log_probs is None else log_probs[response]
        trainer = None if trained is None or response < 0 else float(trained.log_probs[response])
        counts, version = response >= 0 and bool(mask[response]), version_at.get(response)
        advantage = None if training is None or not counts else training.advantage
        views.append(
            TokenView(
                position=position,
                token_id=token_id,
                text=None if token_text is None else token_text(token_id),
                version=version,
                log_prob=log_prob,
                trained=counts,
                trainer_log_prob=trainer,
                gap=None if trainer is None or log_prob is None or version is None else trainer - log_prob,
                advantage=float(trained.advantages[response]) if counts and trained is not None else advantage,
            )
        )
    return views
