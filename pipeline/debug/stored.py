"""--load-debug-rollout-data: batches of stored samples as accepted groups in a pool that trainer ranks read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from storage.archive import SUFFIX, RolloutArchive, create_or_open_pool, publish_copies
from storage.columns import EncodedGroup, summary_from_header
from storage.debug_samples import read_pt
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.refs import GroupRef
from storage.summary import with_removed
from vime.errors import DataError, SampleError
from vime.utils.types import Sample

FLAG = "--load-debug-rollout-data"


class StoredRollouts:
    """The files that a template names. Whole archives are used where they are; all else is published anew.

    Use with `with`: what was published for the session goes at its end.
    """

    def __init__(
        self,
        template: str,
        *,
        scratch: Path,
        group_size: int,
        encode: Callable[[Sequence[Sample]], EncodedGroup],
        check: Callable[[Sequence[Sample]], None],
        first_rollout: int = 0,
        subsample: float | None = None,
    ) -> None:
        """`scratch` is a folder of the session's own; samples without a group are taken `group_size` at a time.

        Raises `DataError` when the file of `first_rollout` can't be used.
        """
        self._template, self._subsample, self._group_size = template, subsample, group_size
        self._encode, self._check, self._scratch = encode, check, scratch
        first = self._path(first_rollout)
        self._reuses = first.name.endswith(SUFFIX) and subsample is None
        shutil.rmtree(scratch, ignore_errors=True)
        if self._reuses:
            with RolloutArchive.open(first) as archive:
                root, run_id = archive.pool.root, archive.pool.run_id
            self.pool = Pool.open(root, run_id)
        else:
            self.pool = create_or_open_pool(scratch / "pool", "debug")

    def batch(self, rollout_id: int) -> list[AcceptedGroup]:
        """The groups of one rollout. Raises `DataError`, `SampleError` or `StorageError`, naming the file."""
        path = self._path(rollout_id)
        stored = self._archived(path) if self._reuses else self._published(path, rollout_id)
        found = []
        for position, (ref, removed) in enumerate(stored):
            summary = with_removed(summary_from_header(self.pool.read_header(ref)), removed)
            found.append(AcceptedGroup(position, summary.group_index, ref, summary))
        return found

    def close(self) -> None:
        self.pool.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, rollout_id: int) -> Path:
        return Path(self._template.format(rollout_id=rollout_id)).absolute()

    def _archived(self, path: Path) -> list[tuple[GroupRef, list[int]]]:
        """Where the groups lie, and their members that are not trained."""
        with RolloutArchive.open(path) as archive:
            found = (archive.pool.root, archive.pool.run_id)
            if found != (self.pool.root, self.pool.run_id):
                raise DataError(
                    f"{FLAG} {path}: its samples are in pool {found[0]} of run {found[1]!r}, those of the first file "
                    f"in {self.pool.root} of {self.pool.run_id!r}; allowed: one pool.",
                    next_step="Train the archives of each pool in a job of their own, or export them as .pt files.",
                )
            return [(group.ref, group.removed) for group in archive.index.groups]

    def _published(self, path: Path, rollout_id: int) -> list[tuple[GroupRef, list[int]]]:
        groups = grouped(thinned(read_stored(path), self._subsample, path), self._group_size)
        try:
            for group in groups:
                self._check(group)
            encoded = [self._encode(group) for group in groups]
        except SampleError as error:
            raise SampleError(f"{FLAG} {path}: {error.message}", next_step=error.next_step) from error
        return [(ref, []) for ref in publish_copies(self.pool, encoded, submission_id=f"stored:{rollout_id}")]


def thinned(samples: Sequence[Sample], fraction: float | None, path: Path) -> list[Sample]:
    """The first and the last half of `int(len(samples) * fraction)` samples. Raises `DataError` when none is left."""
    keep = len(samples) if fraction is None else int(len(samples) * fraction)
    if keep == 0:
        raise DataError(
            f"{FLAG} {path}: {len(samples)} samples, of which {fraction if fraction is not None else 'all'} are to be "
            "used, are none.",
            next_step="Raise --load-debug-rollout-data-subsample, or name another file.",
        )
    head = keep // 2
    return [*samples[:head], *samples[len(samples) - (keep - head) :]]


def grouped(samples: Sequence[Sample], group_size: int) -> list[list[Sample]]:
    """Samples by group, in the order in which groups first come; those without a number get one by their place."""
    groups: dict[int, list[Sample]] = {}
    for place, sample in enumerate(samples):
        sample.index = place if sample.index is None else sample.index
        sample.group_index = place // group_size if sample.group_index is None else sample.group_index
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def read_stored(path: Path) -> list[Sample]:
    """The samples of a `.pt` file or of an archive. Raises `DataError` or `StorageError`, naming the file."""
    if not path.name.endswith(SUFFIX):
        return read_pt(path)
    with RolloutArchive.open(path) as archive:
        return archive.load_samples()
