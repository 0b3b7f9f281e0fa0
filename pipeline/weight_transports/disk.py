"""Weights through a folder that trainer and engines share: whole versions, or what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.weight_transports.transport import WORK_SHARE, Deadline, Failures, Prepared, on_each, staged
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import FromFolder, FromMirror, LoadStaged, StageRequest


class PublishedVersion(msgspec.Struct, frozen=True):
    """A version on disk, as the trainer tells of it. `names` and `digest` are those of the whole weights."""

    folder: str
    names: list[str]
    digest: str
    num_bytes: int
    wire_bytes: int
    changed_bytes: int


class DiskSource(Protocol):
    """The trainer's side."""

    async def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        """Write the trainer's weights; whole when `full`, or when there is nothing to build on."""
        ...

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        """Call the user's hook on every rank; the version is there for all engines when it returns."""
        ...

    async def remove_version(self, version: int) -> None:
        """Delete a version's folder."""
        ...


@dataclass(frozen=True)
class DiskSettings:
    """Where versions are, and what happens around reading one."""

    local_dir: Path | None = None
    """Folder on each engine's host for its copy; None: engines read the shared folder."""
    keep_files: bool = False
    pre_read_hook: str | None = None


class DiskTransport:
    """Engines gather and verify a version while they sample on, so that loading it reads a file of their own host."""

    def __init__(self, source: DiskSource, settings: DiskSettings) -> None:
        self._source, self._settings = source, settings
        self._on_disk: list[int] = []
        self._newest: tuple[int, PublishedVersion] | None = None
        """The version that was written last."""

    async def prepare(
        self, version: int, engines: Sequence[EngineClient], *, full: bool, deadline: Deadline
    ) -> Prepared:
        """Write, call the hook, and let every engine (or host) fetch and verify the version."""
        published = await self._written(version, full=full, deadline=deadline)
        names = [engine.address for engine in engines]
        hook = self._source.run_post_write_hook(published.folder, names)
        await deadline.bound("running the post-write hook", hook)
        request = self._request(version, published, deadline)
        failures = await on_each(engines, "staging on", [e.stage_weights(request) for e in engines], deadline)
        fetching = [engine for engine in engines if engine.address not in failures]
        failures |= await on_each(
            fetching, "fetching on", [staged(engine, version) for engine in fetching], deadline, share=WORK_SHARE
        )
        return Prepared(failures, published.wire_bytes, published.changed_bytes / max(1, published.num_bytes))

    @property
    def stages(self) -> bool:
        return True

    def repeats(self, version: int) -> bool:
        """While its folder is there."""
        is_there = version in self._on_disk or self._settings.keep_files
        return self._newest is not None and self._newest[0] == version and is_there

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        """From the folder that was verified."""
        loads = [engine.update_weights(LoadStaged(version)) for engine in engines]
        return await on_each(engines, "loading on", loads, deadline, share=WORK_SHARE)

    async def finished(self, version: int, *, published: bool) -> None:
        """Delete versions that nobody reads any more; with a copy on the hosts, this one too.

        What could not be published is deleted in any case.
        """
        if self._settings.keep_files and published:
            self._on_disk = [old for old in self._on_disk if old != version]
            return
        stays = version if published and self._settings.local_dir is None else None
        for old in [old for old in self._on_disk if old != stays]:
            await self._source.remove_version(old)
        self._on_disk = [old for old in self._on_disk if old == stays]

    async def _written(self, version: int, *, full: bool, deadline: Deadline) -> PublishedVersion:
        """What is on disk already, or is written now."""
        if self._newest is not None and self.repeats(version):
            return self._newest[1]
        self._on_disk.append(version)
        published = await deadline.bound("writing the version", self._source.write_version(version, full=full))
        self._newest = (version, published)
        return published

    def _request(self, version: int, published: PublishedVersion, deadline: Deadline) -> StageRequest:
        hook = self._settings.pre_read_hook
        if self._settings.local_dir is None:
            return FromFolder(version, published.folder, published.names, published.digest, hook)
        return FromMirror(
            version,
            str(Path(published.folder).parent),
            str(self._settings.local_dir),
            published.names,
            published.digest,
            lock_timeout_s=deadline.left_s(),
            pre_read_hook=hook,
        )
