"""Publications through disk: what is written, fetched, hooked and deleted, and in which order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.weight_transports.disk import DiskSettings
from tests.pipeline.publication_rig import Rig, two_engines
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.disk.layout import read_index, version_folder
from vime.backends.vllm_utils.disk.mirror import HostMirror


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with two_engines() as engines:
        yield engines


@pytest.fixture
def hooks() -> Iterator[ModuleType]:
    """A module of the user's with `written` and `pulled`, which note their calls."""
    module: Any = ModuleType("hooks_of_the_user")
    module.calls = []
    module.written = lambda *arguments: module.calls.append(("written", *arguments))
    module.pulled = lambda *arguments: module.calls.append(("pulled", *arguments))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


async def test_the_first_version_is_whole_and_those_after_it_are_changes(
    engines: list[StandinEngine], tmp_path: Path
) -> None:
    disk = DiskSettings(local_dir=tmp_path / "local", keep_files=True)
    async with Rig(engines, folder=tmp_path, disk=disk) as rig:
        publications = [await rig.publish() for _ in range(3)]
        await rig.check_standing()
    bases = [read_index(version_folder(tmp_path / "published", version)).base for version in (1, 2, 3)]
    assert bases == [None, 1, 2]
    assert publications[0].density == 1.0
    assert 0 < publications[1].density < 0.6
    assert publications[1].wire_bytes > 0
    assert HostMirror(tmp_path / "local").version == 3


async def test_versions_that_nobody_reads_any_more_are_deleted(engines: list[StandinEngine], tmp_path: Path) -> None:
    async with Rig(engines, folder=tmp_path) as rig:
        for _ in range(3):
            await rig.publish()
    assert folders(tmp_path / "published") == []


async def test_without_a_copy_on_the_host_the_version_that_engines_read_stays(
    engines: list[StandinEngine], tmp_path: Path
) -> None:
    async with Rig(engines, folder=tmp_path, disk=DiskSettings()) as rig:
        for _ in range(3):
            await rig.publish()
        await rig.check_standing()
    assert folders(tmp_path / "published") == ["weight_v000003"]


async def test_versions_are_fetched_while_the_engines_sample(engines: list[StandinEngine], tmp_path: Path) -> None:
    async with Rig(engines, folder=tmp_path) as rig:
        await rig.publish()
        engines[0].faults.steps["vime_staging"] = "hang"
        publishing = asyncio.create_task(rig.publish())
        assert (await rig.generate(max_tokens=20)).finish_reason == "length"
        assert rig.admission.said == ["pause", "resume 1"]
        del engines[0].faults.steps["vime_staging"]
        assert (await publishing).raised


async def test_hooks_run_after_writing_and_before_reading(
    engines: list[StandinEngine], tmp_path: Path, hooks: ModuleType
) -> None:
    disk = DiskSettings(local_dir=tmp_path / "local", pre_read_hook="hooks_of_the_user.pulled")
    async with Rig(engines, folder=tmp_path, disk=disk, hook="hooks_of_the_user.written") as rig:
        await rig.publish()
    addresses = [engine.address for engine in engines]
    published = tmp_path / "published"
    assert hooks.calls[0] == ("written", None, str(published / "weight_v000001"), addresses)
    assert hooks.calls[1:] == [("pulled", str(published), 1)] * 2


async def test_a_hook_that_fails_is_named_and_costs_one_publication(
    engines: list[StandinEngine], tmp_path: Path, hooks: Any
) -> None:
    async with Rig(engines, folder=tmp_path, hook="hooks_of_the_user.written") as rig:
        await rig.publish()
        works = hooks.written
        hooks.written = lambda *_: 1 / 0
        assert not (await rig.publish()).raised
        assert len(rig.admission.serving) == 2
        hooks.written = works
        assert (await rig.publish()).raised
        assert rig.source.written[-1] == (3, True)
        await rig.check_standing()


async def test_a_host_whose_copy_is_lost_is_given_a_whole_version(engines: list[StandinEngine], tmp_path: Path) -> None:
    async with Rig(engines, folder=tmp_path) as rig:
        await rig.publish()
        (tmp_path / "local" / "mirror.json").unlink()
        publication = await rig.publish()
        assert (publication.version, publication.raised) == (1, False)
        assert (await rig.publish()).raised
        await rig.check_standing()


async def test_numbers_go_on_above_every_folder_that_is_there(engines: list[StandinEngine], tmp_path: Path) -> None:
    (tmp_path / "published" / "weight_v000041").mkdir(parents=True)
    async with Rig(engines, folder=tmp_path) as rig:
        assert rig.source.rank.highest_version() == 41
