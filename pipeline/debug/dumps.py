"""--save-debug-rollout-data and --dump-details: each rollout batch's samples, when the batch is planned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from pipeline.optional_records import OptionalRecords
from pipeline.planner import BatchPlan, PlannedSample
from storage.archive import (
    OWN_POOL,
    SUFFIX,
    ArchivedGroup,
    RolloutArchive,
    create_or_open_pool,
    publish_copies,
    read_samples,
)
from storage.contracts import PayloadPool
from storage.debug_samples import write_pt
from storage.pool import Pool
from vime.errors import SettingsError
from vime.rollout.tokenizer import load_tokenizer

OpenPool = Callable[[], PayloadPool]


class RolloutDumps:
    """Writes one file for each rollout batch."""

    def __init__(
        self,
        template: str | None,
        open_pool: OpenPool,
        note: Callable[[str], None],
        records: OptionalRecords | None = None,
    ) -> None:
        """`template` is a path with `{rollout_id}`, None for no file; `note` is told what the user should know.

        A file that can't be written is noted in `records`, where the files aren't all that the job is for.
        """
        self._template, self._open_pool, self._note, self._records = template, open_pool, note, records

    async def save(self, plan: BatchPlan) -> None:
        """Write the samples of a planned batch. Raises `DataError` and, without `records`, `StorageError`."""
        if self._template is None:
            return
        work = partial(self._save, plan, Path(self._template.format(rollout_id=plan.rollout_id)).absolute())
        if self._records is None:
            await asyncio.to_thread(work)
        else:
            await asyncio.to_thread(self._records.write, "dump of rollout data", work)

    def _save(self, plan: BatchPlan, path: Path) -> None:
        with closing(self._open_pool()) as pool:
            if path.name.endswith(SUFFIX):
                self._archive(plan, path, pool)
                return
            samples = [read_samples(pool, group.ref, group.removed) for group in archived_groups(plan)]
            write_pt(path, plan.rollout_id, [sample for members in samples for sample in members])

    def _archive(self, plan: BatchPlan, path: Path, pool: PayloadPool) -> None:
        groups = archived_groups(plan)
        if isinstance(pool, Pool):
            self._save_archive(path, pool, groups, plan)
            return
        with create_or_open_pool(path.parent / OWN_POOL / "pool", "debug") as own:
            copies = [pool.read_group(group.ref) for group in groups]
            refs = publish_copies(own, copies, submission_id=f"{plan.batch_id}:{path.name}")
            moved = [
                msgspec.structs.replace(group, ref=ref, position=None) for ref, group in zip(refs, groups, strict=True)
            ]
            self._save_archive(path, own, moved, plan)

    def _save_archive(self, path: Path, pool: Pool, groups: Sequence[ArchivedGroup], plan: BatchPlan) -> None:
        told = write_archive(path, pool, groups, rollout_id=plan.rollout_id, branch=plan.branch)
        if told:
            self._note(told)


def write_archive(
    path: Path,
    pool: Pool,
    groups: Sequence[ArchivedGroup],
    *,
    rollout_id: int,
    branch: str,
    evaluation: bool = False,
) -> str:
    """Write an archive, under the branch's own name where an earlier session has one there; what to tell then."""
    try:
        RolloutArchive.save(path, pool, groups, rollout_id=rollout_id, evaluation=evaluation)
    except FileExistsError:
        own = path.with_name(f"{path.name.removesuffix(SUFFIX)}.{branch}{SUFFIX}")
        RolloutArchive.save(own, pool, groups, rollout_id=rollout_id, evaluation=evaluation)
        return f"{path} is of an earlier session and stays; this one's samples are in {own.name}."
    return ""


def archived_groups(plan: BatchPlan) -> list[ArchivedGroup]:
    """The groups of a plan, each with the indices of its members in their order."""
    members: list[dict[int, PlannedSample]] = [{} for _ in plan.groups]
    for sample in plan.samples:
        members[sample.group][sample.member] = sample
    return [
        ArchivedGroup(
            group.ref,
            group.group_index,
            group.position,
            [own[member].sample_index for member in sorted(own)],
            [member for member in sorted(own) if own[member].removed],
        )
        for group, own in zip(plan.groups, members, strict=True)
    ]


def save_tokenizer(hf_checkpoint: str, folder: Path) -> None:
    """What --dump-details keeps so that the dumped token ids can be read: tokenizer, and processor where there is one.

    Raises `ModelError` for a checkpoint without a tokenizer, `SettingsError` where it can't be kept.
    """
    from transformers import AutoProcessor

    tokenizer = load_tokenizer(hf_checkpoint)
    try:
        tokenizer.save_pretrained(folder)
        if (Path(hf_checkpoint) / "preprocessor_config.json").is_file():
            AutoProcessor.from_pretrained(hf_checkpoint).save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--dump-details keeps the tokenizer of --hf-checkpoint {hf_checkpoint}: {error}.",
            next_step="Complete the checkpoint, or leave out --dump-details.",
        ) from error
