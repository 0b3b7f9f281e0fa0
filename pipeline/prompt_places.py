"""The prompts of a run's groups, and the lines of the file that they come from; read off the disk."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from recovery.run_location import RunLocation
from storage.pool import Pool
from storage.prompt_codec import decode_prompt
from storage.queue_view import GroupView
from vime.data.cursor import PromptTask
from vime.data.prompts import split_slice
from vime.data.record_files import record_places
from vime.errors import DataError, StorageError


class PromptPlace(msgspec.Struct, frozen=True):
    """Where a prompt comes from."""

    row: int
    """Number of the record in its file, from 0."""
    epoch: int
    place: str | None
    """file:line; None where the file is not known or not there."""


def read_prompts(pool: Pool, groups: Iterable[GroupView]) -> dict[int, PromptTask]:
    """Group index -> prompt; without those that can't be read, as it may be once their groups have ended."""
    prompts: dict[int, PromptTask] = {}
    for group in groups:
        try:
            prompts[group.group_index] = decode_prompt(pool.read_blob(group.prompt_ref))
        except StorageError:
            continue
    return prompts


def prompt_places(location: RunLocation, prompts: Iterable[PromptTask]) -> dict[int, PromptPlace]:
    """Group index -> where its prompt comes from."""
    path, found = location.settings.data.prompt_data, list(prompts)
    places: dict[int, str] = {}
    if path is not None:
        try:
            places = record_places(split_slice(path)[0], [prompt.row for prompt in found])
        except DataError:
            places = {}  # the file is gone or elsewhere: the record's number still says which it was
    return {p.group_index: PromptPlace(p.row, p.epoch, places.get(p.row)) for p in found}
