"""--custom-convert-samples-to-train-data-path: a function of the user's own makes what a batch trains on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from pipeline.planner import ProcessedRewards
from pipeline.user_functions import call_user_function
from storage.archive import publish_copies, read_samples
from storage.columns import EncodedGroup
from storage.contracts import PayloadPool
from storage.queue_types import AcceptedGroup
from storage.summary import summarize, with_removed
from vime.errors import RewardError, SampleError
from vime.utils.types import Sample

FLAG = "--custom-convert-samples-to-train-data-path"
Convert = Callable[[Any, list[Sample]], Any]
"""`f(args, samples)` -> training data: lists by name, each with an entry for every sample."""

_REQUIRED = ("tokens", "response_lengths", "rewards")
_PLAIN_LISTS = {
    "tokens": "tokens",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
"""Name in the training data -> field of `Sample` that is a list of numbers."""
_ARRAYS = (
    *("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs"),
)
"""Fields of `Sample` that are arrays, and their names in the training data."""
_NUMBERS = {"response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "rollout_ids", "source_names"}
_FOLLOWS = {"total_lengths", "rollout_mask_sums", "round_number", "prompt", "metadata", "multimodal_train_inputs"}
"""Accepted and not read: it follows from the others, or belongs to the sample."""
KNOWN = {*_PLAIN_LISTS, *_ARRAYS, *_NUMBERS, *_FOLLOWS}


@dataclass(frozen=True)
class Conversion:
    """How converted samples are checked and stored."""

    check: Callable[[Sequence[Sample]], None]
    encode: Callable[[Sequence[Sample]], EncodedGroup]


def convert_batch(
    groups: Sequence[AcceptedGroup],
    pool: PayloadPool,
    function: Convert,
    args: Any,
    *,
    conversion: Conversion,
    batch_id: str,
) -> tuple[list[AcceptedGroup], ProcessedRewards]:
    """Call the function once with all samples of a batch; the groups as they are trained, and their rewards.

    What the function makes is stored beside the samples, under `batch_id`. `rewards` are the advantages before any
    estimator, `raw_reward` what is reported.

    Raises:
        RewardError: it raised, or returned something that can't be trained.
        StorageError: a group can't be read or written.
    """
    batch = [read_samples(pool, group.ref, group.summary.removed) for group in groups]
    samples = [sample for members in batch for sample in members]
    data = call_user_function(FLAG, function, args, samples)
    columns = _columns(data, len(samples))
    rewards = [_finite("rewards", value) for value in columns["rewards"]]
    raw = [_finite("raw_reward", value) for value in columns.get("raw_reward", rewards)]
    made = [_converted(sample, columns, row, raw[row]) for row, sample in enumerate(samples)]
    cuts = list(accumulate(map(len, batch), initial=0))
    members = [made[start:stop] for start, stop in pairwise(cuts)]
    try:
        for group in members:
            conversion.check(group)
        encoded = [conversion.encode(group) for group in members]
    except SampleError as error:
        raise RewardError(f"{FLAG}: {error.message}", next_step=error.next_step or "Correct the function.") from error
    refs = publish_copies(pool, encoded, submission_id=f"converted:{batch_id}")
    converted = [
        msgspec.structs.replace(group, ref=ref, summary=with_removed(summarize(own), group.summary.removed))
        for group, ref, own in zip(groups, refs, members, strict=True)
    ]
    raw_by_group, rewards_by_group = (
        [values[start:stop] for start, stop in pairwise(cuts)] for values in (raw, rewards)
    )
    return converted, ProcessedRewards(raw_by_group, rewards_by_group)


def _columns(data: Any, num_samples: int) -> Mapping[str, Sequence[Any]]:
    if not isinstance(data, Mapping):
        raise _refused(f"{type(data).__name__}", "a dict of lists")
    unknown, absent = sorted(data.keys() - KNOWN), [name for name in _REQUIRED if name not in data]
    if unknown or absent:
        found = f"the unknown names {', '.join(unknown)}" if unknown else f"nothing under {', '.join(absent)}"
        raise _refused(found, f"{', '.join(_REQUIRED)} and any of {', '.join(sorted(KNOWN - set(_REQUIRED)))}")
    columns = {name: values for name, values in data.items() if name not in _FOLLOWS and values is not None}
    for name, values in columns.items():
        if len(values) != num_samples:
            raise _refused(f"{len(values)} entries of {name}", f"one for each of {num_samples} samples")
    return columns


def _converted(sample: Sample, columns: Mapping[str, Sequence[Any]], row: int, raw_reward: float) -> Sample:
    """The sample with the function's values, and without the per-token values that it left out."""
    made = copy.copy(sample)
    for name, field in _PLAIN_LISTS.items():
        value = columns[name][row] if name in columns else None
        setattr(made, field, None if value is None else np.asarray(value).tolist())
    for field in _ARRAYS:
        value = columns[field][row] if field in columns else None
        setattr(made, field, None if value is None else np.asarray(value))
    made.response_length = int(columns["response_lengths"][row])
    made.reward, made.metadata = raw_reward, {k: v for k, v in sample.metadata.items() if k != "raw_reward"}
    if "sample_indices" in columns and int(columns["sample_indices"][row]) != sample.index:
        raise _refused(f"sample {columns['sample_indices'][row]} in place {row}", f"sample {sample.index} there")
    if "rollout_ids" in columns:
        made.rollout_id = int(columns["rollout_ids"][row])
    if "truncated" in columns:
        made.status = Sample.Status.TRUNCATED if columns["truncated"][row] else Sample.Status.COMPLETED
    if "source_names" in columns:
        vars(made)["source"] = str(columns["source_names"][row])
    if made.response_length != sample.response_length and sample.version_spans:
        made.version_spans = [(min(version for version, _, _ in sample.version_spans), 0, made.response_length)]
    return made


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise _refused(f"{number} in {name}", "finite numbers")
    return number


def _refused(found: str, allowed: str) -> RewardError:
    return RewardError(f"{FLAG} returned {found}, allowed: {allowed}.", next_step="Correct the function.")
