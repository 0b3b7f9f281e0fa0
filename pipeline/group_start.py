"""What a leased group starts from: its prompt, or the samples that it was returned with."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Collection, Sequence

from pipeline.messages import Work
from storage.columns import decode_group
from storage.contracts import PayloadPool
from storage.prompt_codec import decode_prompt
from storage.queue_types import Stage
from vime.data.cursor import PromptTask
from vime.utils.types import Sample

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def read_start(work: Work, pool: PayloadPool, num_samples: int) -> list[Sample]:
    """The samples of a leased group: `num_samples` fresh ones, or those that it was returned with, as they were.

    Raises `CorruptDataError` or `StorageError`.
    """
    if work.stage is Stage.FRESH:
        prompt = decode_prompt(pool.read_blob(work.prompt_ref))
        return [_fresh_sample(prompt, member) for member in range(num_samples)]
    stored = pool.read_group(work.prompt_ref)
    return decode_group(stored.header, stored.columns)


def is_done(sample: Sample) -> bool:
    """Whether a sample is finished and rewarded."""
    return is_generated(sample) and sample.reward is not None


def is_generated(sample: Sample) -> bool:
    """Whether a sample is finished, with or without a reward."""
    return sample.status in FINISHED and sample.response_length > 0


def can_continue(sample: Sample) -> bool:
    """Whether a sample is the beginning of a response that was aborted."""
    return sample.status is Sample.Status.ABORTED and sample.response_length > 0


def redone(samples: Sequence[Sample], failed: Collection[int]) -> list[Sample]:
    """The samples, but a fresh one in place of each rollout with a sample whose `id` is in `failed`."""
    rollouts = {rollout_of(sample) for sample in samples if id(sample) in failed}
    kept: list[Sample] = []
    for sample in samples:
        if rollout_of(sample) not in rollouts:
            kept.append(sample)
        elif all(rollout_of(other) != rollout_of(sample) for other in kept):
            kept.append(anew(sample))
    return kept


def rollout_of(sample: Sample) -> int | None:
    """The execution that a sample is a segment of."""
    return sample.index if sample.rollout_id is None else sample.rollout_id


def oldest_of(group: Sequence[Sample]) -> int | None:
    """Oldest policy version among the tokens of a group, None when nothing was sampled."""
    return min((version for sample in group if (version := sample.min_version()) is not None), default=None)


def anew(sample: Sample) -> Sample:
    """The sample before it had a response; of a segment, before its whole rollout had one."""
    fresh = Sample(
        group_index=sample.group_index,
        index=rollout_of(sample),
        prompt=sample.prompt,
        label=sample.label,
        metadata=copy.deepcopy(sample.metadata),
        multimodal_inputs=sample.multimodal_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        custom_rm_path=sample.custom_rm_path,
        generate_function_path=sample.generate_function_path,
        session_id=uuid.uuid4().hex,
    )
    if "source" in vars(sample):
        vars(fresh)["source"] = vars(sample)["source"]
    return fresh


def _fresh_sample(prompt: PromptTask, member: int) -> Sample:
    sample = Sample(
        group_index=prompt.group_index,
        index=prompt.first_sample_index + member,
        prompt=prompt.prompt,
        label=prompt.label,
        metadata=copy.deepcopy(prompt.metadata),
        multimodal_inputs=copy.deepcopy(prompt.media) or None,
        session_id=uuid.uuid4().hex,
    )
    vars(sample).update(copy.deepcopy(prompt.fields))
    return sample
