"""--rollout-sample-filter-path: which samples of a batch are not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipeline.stored_samples import GroupReader, stored_samples
from pipeline.user_functions import call_user_function
from storage.queue_types import AcceptedGroup
from storage.summary import with_removed
from vime.utils.types import Sample

FLAG = "--rollout-sample-filter-path"
SampleFilter = Callable[[Any, list[list[Sample]]], None]
"""`f(args, groups)`, which sets `remove_sample`."""


def filter_samples(
    groups: Sequence[AcceptedGroup], pool: GroupReader, function: SampleFilter, args: Any
) -> list[AcceptedGroup]:
    """The groups, with the samples counted as removed that the function removes; without candidates and routes.

    Raises:
        RewardError: the function raised.
        StorageError: a group can't be read.
    """
    batch = [stored_samples(group.ref, pool) for group in groups]
    call_user_function(FLAG, function, args, [list(samples) for samples in batch])
    return [_marked(group, samples) for group, samples in zip(groups, batch, strict=True)]


def _marked(group: AcceptedGroup, samples: Sequence[Sample]) -> AcceptedGroup:
    removed = [member for member, sample in enumerate(samples) if sample.remove_sample]
    return msgspec.structs.replace(group, summary=with_removed(group.summary, removed))
