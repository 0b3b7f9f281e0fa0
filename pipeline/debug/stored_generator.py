"""--load-forge-rollout-data: stored samples take the place of generation in a run with engines."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from pipeline.debug.stored import grouped, read_stored
from vime.backends.vllm_utils.protocol import START_VERSION
from vime.errors import DataError, SampleError
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

FLAG = "--load-forge-rollout-data"
_TAKEN = (
    *("tokens", "response", "response_length", "status", "reward", "loss_mask", "rollout_log_probs", "remove_sample"),
    *("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts", "teacher_log_probs"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs", "train_metadata"),
)
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


class StoredGenerator:
    """Fills each sample with the stored one of the same place: groups in the order of the files, member by member.

    The queue's group `g` gets group `g % batch_size` of the file of rollout `g // batch_size`; of a file that has fewer
    groups they come round again. Stored tokens count as of the weights that engines start with.
    """

    def __init__(self, template: str, *, batch_size: int, group_size: int) -> None:
        """`template` is a path, `{rollout_id}` in it is filled in. Raises `DataError` when the first can't be used."""
        self._template, self._batch_size, self._group_size = template, batch_size, group_size
        self._groups = functools.lru_cache(maxsize=2)(self._read)
        self._groups(0)

    async def generate(
        self,
        engine: Any,  # noqa: ARG002
        sample: Sample,
        sampling: SamplingSettings,  # noqa: ARG002
        *,
        cache_salt: str | None,  # noqa: ARG002
        evaluation: bool = False,  # noqa: ARG002
        hand_over: Any = None,  # noqa: ARG002
    ) -> None:
        """Copy tokens, columns, status and reward; there is no request. Raises `DataError` or `SampleError`."""
        rollout_id, place = divmod(sample.group_index or 0, self._batch_size)
        groups = await asyncio.to_thread(self._groups, rollout_id)
        stored = groups[place % len(groups)][(sample.index or 0) % self._group_size]
        if stored.status not in _FINISHED:
            raise SampleError(
                f"{FLAG} {self._path(rollout_id)}: sample {stored.index} is {stored.status.value}, allowed: completed "
                "or truncated.",
                next_step="Store finished samples.",
            )
        for field in _TAKEN:
            setattr(sample, field, vars(stored)[field])
        sample.version_spans = [(START_VERSION, start, stop) for _, start, stop in stored.version_spans]
        sample.weight_versions = [str(START_VERSION)] if stored.version_spans else []

    def _read(self, rollout_id: int) -> list[list[Sample]]:
        path = self._path(rollout_id)
        groups = grouped(read_stored(path), self._group_size)
        for group in groups:
            if len(group) != self._group_size:
                raise DataError(
                    f"{FLAG} {path}: group {group[0].group_index} has {len(group)} samples, allowed: "
                    f"{self._group_size} (--n-samples-per-prompt).",
                    next_step="Give the --n-samples-per-prompt that the samples were stored with.",
                )
        if not groups:
            raise DataError(f"{FLAG} {path} holds no samples.", next_step="Name another file.")
        return groups

    def _path(self, rollout_id: int) -> Path:
        return Path(self._template.format(rollout_id=rollout_id)).absolute()
