"""What samples of a leased group carry of their lease, in attributes that `Sample` doesn't declare."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pipeline.messages import Work
from vime.errors import SampleError
from vime.utils.types import Sample

PREFIX = "_queue_"
"""Of attributes that end with the lease."""


def stamp_leased(group: Sequence[Sample], work: Work, branch: str) -> None:
    """Of a group that was leased just now, on this branch."""
    for sample in group:
        _stamp(
            sample,
            _queue_lease=work.lease,
            _queue_work=work,
            _queue_generation_start=len(sample.tokens),
            _queue_branch=branch,
            _queue_source_positions=[],
        )


def stamp_accepted(group: Sequence[Sample], position: int | None) -> None:
    """Of a group that was handed to the trainer: its position in the queue, None where it was refused."""
    for sample in group:
        _stamp(sample, _queue_receipt=position)


def inherit_stamps(group: Sequence[Sample], origin: Sequence[Sample]) -> None:
    """Give samples that have none the stamps of the group that they were made from."""
    stamps = {name: value for name, value in vars(origin[0]).items() if name.startswith(PREFIX)}
    for sample in group:
        if "_queue_lease" not in vars(sample):
            _stamp(sample, **{**stamps, "_queue_generation_start": 0})


def lease_of(group: Sequence[Sample]) -> bytes:
    """The lease that the samples carry. Raises `SampleError` for a group without one or with two."""
    leases = {vars(sample)["_queue_lease"] for sample in group if "_queue_lease" in vars(sample)}
    if len(leases) != 1:
        index = group[0].group_index if group else None
        raise SampleError(
            f"The {len(group)} samples of group {index} have {len(leases)} leases, allowed: one.",
            next_step="Give back whole groups, with at least one of the samples that get_samples gave out.",
        )
    return bytes(leases.pop())


def unstamped(sample: Sample, branch: str) -> Sample:
    """A copy without what belongs to the lease, and with the origin of the tokens that were made under it."""
    plain = copy.copy(sample)
    start = vars(sample).get("_queue_generation_start", 0)
    if len(sample.tokens) > start:
        segment = {
            "start": start,
            "stop": len(sample.tokens),
            "branch": branch,
            "reported_versions": list(sample.weight_versions),
        }
        _stamp(plain, queue_policy_segments=[*vars(sample).get("queue_policy_segments", []), segment])
    for name in [name for name in vars(plain) if name.startswith(PREFIX)]:
        delattr(plain, name)
    return plain


def _stamp(sample: Sample, **attributes: Any) -> None:
    """Set attributes that `Sample` doesn't declare."""
    vars(sample).update(attributes)
