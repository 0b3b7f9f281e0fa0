"""A data source of the user's own as a stream of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from storage.files import make_folder, remove_durably, write_atomically
from vime.data.cursor import PromptCursor, PromptTask
from vime.data.record_files import BadRecord
from vime.errors import DataError, reason_of
from vime.utils.equality import same_value
from vime.utils.types import Sample

_STATE_VERSION = 1
_Answer = TypeVar("_Answer")
_BARE = Sample()
_NOT_COPIED = frozenset(
    {
        *("prompt", "label", "metadata", "multimodal_inputs", "tokens", "response", "response_length"),
        *("group_index", "index", "rollout_id", "session_id", "status", "spec_info", "prefix_cache_info"),
    }
)
"""Fields of a sample that a prompt has otherwise, or that the stream sets itself."""


class DataSource(Protocol):
    """The documented interface. `add_samples` is never called: groups that come back wait in the queue."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next groups."""

    def save(self, rollout_id: int) -> None:
        """Keep the place after a rollout."""

    def load(self, rollout_id: int | None = None) -> None:
        """Go to the place that was saved for a rollout; None: to the beginning."""

    def __len__(self) -> int:
        """Prompts in one epoch."""


class _State(msgspec.Struct, frozen=True):
    """How many groups the source had given out when it was saved for a rollout."""

    version: int
    num_taken: int


class CustomPromptSource:
    """Takes groups from a source that has a place of its own, and gives out their prompts at any cursor.

    The cursor is what counts, so that a crash loses no prompt and repeats none: to reach one, the source is loaded from
    the last save before it, and the groups in between are taken and thrown away. This is exact where the source gives
    the same groups again after `load`.
    """

    long_records: Sequence[BadRecord] = ()
    bad_records: Sequence[BadRecord] = ()

    def __init__(
        self, make: Callable[[], DataSource], *, name: str, n_samples_per_prompt: int, state_folder: Path
    ) -> None:
        """`make` gives a source at its beginning. `name` is its import path. Raises `DataError`."""
        self._make, self._name, self._n_samples, self._folder = make, name, n_samples_per_prompt, state_folder
        self._source, self._num_taken = self._asked(make), 0
        self._size = self._asked(lambda: len(self._source))
        if self._size < 1:
            raise DataError(
                f"{name}: its length is {self._size}, allowed: 1 or more.", next_step="Correct its __len__."
            )

    @property
    def num_records(self) -> int:
        return self._size

    def __len__(self) -> int:
        return self._size

    def cursor_at(self, group_index: int) -> PromptCursor:
        epoch, offset = divmod(group_index, self._size)
        return PromptCursor(epoch, offset, group_index, group_index * self._n_samples)

    def take(self, cursor: PromptCursor, n: int) -> tuple[list[PromptTask], PromptCursor]:
        self._go_to(cursor.next_group_index)
        tasks = [self._task(number, group) for number, group in self._groups(n)]
        return tasks, self.cursor_at(cursor.next_group_index + n)

    def where(self, row: int) -> str:
        return f"{self._name}: group {row} of an epoch"

    def write_bad_records(self, path: Path) -> None:
        """Nothing is set aside here: the source decides what it gives out."""

    def dataset_digest(self) -> str:
        parts = {"source": self._name, "length": self._size}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, rollout_id: int) -> None:
        """Have the source save its place, and remember which cursor that is.

        What was remembered of an earlier save for this rollout goes first: it isn't true of the place now saved.
        Raises `DataError` or `StorageError`.
        """
        path = self._state_path(rollout_id)
        make_folder(self._folder)
        remove_durably(path)
        self._asked(lambda: self._source.save(rollout_id))
        write_atomically(path, msgspec.json.encode(_State(_STATE_VERSION, self._num_taken)))

    def _go_to(self, group_index: int) -> None:
        """Have the source stand before a group."""
        if group_index < self._num_taken or (self._num_taken == 0 and group_index):
            rollout_id, num_taken = self._last_save_before(group_index)
            self._source = self._asked(self._make)
            self._asked(lambda: self._source.load(rollout_id))
            self._num_taken = num_taken
        for _ in self._groups(group_index - self._num_taken):
            pass

    def _groups(self, n: int) -> Iterator[tuple[int, list[Sample]]]:
        """Number and samples of the next `n` groups."""
        wanted = self._num_taken + n
        while self._num_taken < wanted:
            groups = self._asked(lambda: self._source.get_samples(wanted - self._num_taken))
            if not isinstance(groups, list) or not 1 <= len(groups) <= wanted - self._num_taken:
                found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
                raise DataError(
                    f"{self._name}.get_samples({wanted - self._num_taken}) gave {found} at group {self._num_taken}, "
                    "allowed: a list of as many groups, or fewer, but at least one.",
                    next_step="Begin the next epoch when the prompts are through.",
                )
            for group in groups:
                yield self._num_taken, self._checked(group)
                self._num_taken += 1

    def _asked(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            return call()
        except Exception as error:  # the boundary to user code
            raise DataError(
                f"{self._name} raised {type(error).__name__}: {error}.", next_step="Correct the data source."
            ) from error

    def _checked(self, group: Any) -> list[Sample]:
        if not isinstance(group, list) or not group or not all(isinstance(sample, Sample) for sample in group):
            raise self._bad_group(f"is {type(group).__name__}", "a list of samples")
        if len(group) != self._n_samples:
            raise self._bad_group(f"has {len(group)} samples", f"--n-samples-per-prompt {self._n_samples}")
        first = group[0]
        if any(sample.tokens or sample.response for sample in group):
            raise self._bad_group("has a response", "prompts")
        if not all(same_value(_prompt_of(sample), _prompt_of(first)) for sample in group[1:]):
            raise self._bad_group("has different prompts, labels, metadata or media", "copies of one sample")
        return group

    def _bad_group(self, found: str, allowed: str) -> DataError:
        return DataError(
            f"{self._name}: group {self._num_taken} {found}, allowed: {allowed}.", next_step="Correct get_samples."
        )

    def _task(self, number: int, group: Sequence[Sample]) -> PromptTask:
        epoch, row = divmod(number, self._size)
        return PromptTask(
            group_index=number,
            first_sample_index=number * self._n_samples,
            epoch=epoch,
            row=row,
            prompt=group[0].prompt,
            label=group[0].label,
            metadata=group[0].metadata,
            media=group[0].multimodal_inputs or {},
            fields=_other_fields(group[0]),
        )

    def _last_save_before(self, group_index: int) -> tuple[int | None, int]:
        """Rollout of the latest save with no more groups taken, and that number; (None, 0) without one."""
        best: tuple[int | None, int] = (None, 0)
        for path in self._folder.glob("custom_source_*.json"):
            try:
                state = msgspec.json.decode(path.read_bytes(), type=_State)
            except (OSError, msgspec.MsgspecError) as error:
                raise DataError(
                    f"{path}: can't be read: {reason_of(error)}.",
                    next_step="Remove the file; an earlier place is used then.",
                ) from error
            if best[1] < state.num_taken <= group_index:
                best = (int(path.stem.rpartition("_")[2]), state.num_taken)
        return best

    def _state_path(self, rollout_id: int) -> Path:
        return self._folder / f"custom_source_{rollout_id}.json"


def _prompt_of(sample: Sample) -> list[Any]:
    return [sample.prompt, sample.label, sample.metadata, sample.multimodal_inputs, _other_fields(sample)]


def _other_fields(sample: Sample) -> dict[str, Any]:
    """What else the source has set, attributes that `Sample` doesn't declare too."""
    set_here = {name: value for name, value in vars(sample).items() if name not in _NOT_COPIED}
    return {name: value for name, value in set_here.items() if not same_value(value, vars(_BARE).get(name))}
