"""--save-debug-rollout-data and --dump-details: the samples of each evaluation, beside those of rollout batches."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from pipeline.debug.dumps import write_archive
from storage.archive import OWN_POOL, SUFFIX, ArchivedGroup, create_or_open_pool, publish_copies
from storage.columns import encode_group
from storage.debug_samples import write_pt
from storage.pool import Pool
from vime.errors import DataError, SampleError, StorageError
from vime.utils.types import Sample

FLAG = "--save-debug-rollout-data"
DATA_SET = "eval_data_set"
"""Attribute of a dumped sample: the data set that it is of."""


class EvaluationDumps:
    """Writes one file for each evaluation: `eval_<step>` takes the place of a rollout's number in its name."""

    def __init__(self, template: str, open_pool: Callable[[], Pool] | None) -> None:
        """`template` is a path with `{rollout_id}`; `open_pool` opens the run's pool, None where that is in memory."""
        self._template, self._open_pool = template, open_pool

    async def save(self, step: int, branch: str, samples: Mapping[str, Sequence[Sample]]) -> list[str]:
        """Write the samples of each data set, in order; what to tell of it, a sentence each."""
        path = Path(self._template.format(rollout_id=_EvaluationNumber(step))).absolute()
        try:
            told = await asyncio.to_thread(self._save, path, step, branch, _named(samples))
        except (DataError, SampleError, StorageError) as error:
            return [f"{FLAG}: the samples of the evaluation after step {step} are not in {path}: {error.message}"]
        return [told] if told else []

    def _save(self, path: Path, step: int, branch: str, groups: Sequence[list[Sample]]) -> str:
        if not path.name.endswith(SUFFIX):
            write_pt(path, step, [sample for group in groups for sample in group])
            return ""
        with closing(self._pool_for(path)) as pool:
            return self._archive(path, pool, step, branch, groups)

    def _pool_for(self, path: Path) -> Pool:
        if self._open_pool is not None:
            return self._open_pool()
        return create_or_open_pool(path.parent / OWN_POOL / "pool", "debug")

    def _archive(self, path: Path, pool: Pool, step: int, branch: str, groups: Sequence[list[Sample]]) -> str:
        """Keys count on over all data sets, so that each names one sample."""
        encoded = [encode_group(group) for group in groups]
        refs = publish_copies(pool, encoded, submission_id=f"eval:{branch}:{step}:{path.name}")
        archived, first = [], 0
        for number, (ref, group) in enumerate(zip(refs, groups, strict=True)):
            archived.append(ArchivedGroup(ref, number, None, list(range(first, first + len(group)))))
            first += len(group)
        return write_archive(path, pool, archived, rollout_id=step, branch=branch, evaluation=True)


class _EvaluationNumber(int):
    """A step, as a file's name has it, in whatever format the template asks for."""

    def __format__(self, spec: str) -> str:
        return f"eval_{int(self):{spec}}"


def _named(samples: Mapping[str, Sequence[Sample]]) -> list[list[Sample]]:
    """Copies that know their data set, by prompt; those without numbers get them by their place."""
    groups: list[list[Sample]] = []
    for name, of_set in samples.items():
        by_prompt: dict[int, list[Sample]] = {}
        for place, sample in enumerate(of_set):
            named = copy.copy(sample)
            vars(named)[DATA_SET] = name
            named.index = place if sample.index is None else sample.index
            named.group_index = place if sample.group_index is None else sample.group_index
            by_prompt.setdefault(named.group_index, []).append(named)
        groups += by_prompt.values()
    return groups
