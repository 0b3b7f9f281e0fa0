"""The coordinator's rules beyond those that producers and crashes exercise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.coordinator import Coordinator, CoordinatorConfig, open_coordinator
from pipeline.messages import AcceptRequest, LeaseStatus
from storage.columns import encode_group
from storage.pool import Pool
from storage.prompt_codec import decode_prompt
from storage.summary import summarize
from tests.pipeline.mini_stream import synthetic_group, write_prompts
from vime.data.prompts import PromptSource
from vime.errors import StorageError


def opened(folder: Path, branch: str = "a") -> Coordinator:
    root = folder / "pool"
    return open_coordinator(
        open_pool=lambda: Pool.open(root) if (root / "vime" / "pool.json").exists() else Pool.create(root, "rollout"),
        source=PromptSource(write_prompts(folder), n_samples_per_prompt=2),
        owner="test",
        config=CoordinatorConfig(branch, [], groups_wanted=6, max_groups=4, lease_seconds=60),
    )


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = opened(tmp_path)
    yield coordinator
    coordinator.close()


async def accept_one(coordinator: Coordinator, folder: Path, version: int) -> int:
    (work,) = coordinator.lease("w", 1).work
    with Pool.open(folder / "pool") as pool:
        group = synthetic_group(decode_prompt(pool.read_blob(work.prompt_ref)), version)
        (ref,) = pool.publish_groups([(encode_group(group), work.lease)], submission_id=f"s{work.group_index}")
    (reply,) = await coordinator.accept([AcceptRequest(work.lease, ref, summarize(group))])
    assert reply.position is not None
    return reply.position


async def test_highest_version_counts_every_branch_and_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.highest_version() == 0
    position = await accept_one(first, tmp_path, version=7)
    first.training_completed(0, 9, [position])
    assert first.highest_version() == 9
    first.close()
    second = opened(tmp_path, branch="b")
    assert second.highest_version() == 9
    second.close()


async def test_a_repeated_plan_changes_nothing_and_another_one_is_refused(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    positions = [await accept_one(coordinator, tmp_path, 1), await accept_one(coordinator, tmp_path, 1)]
    coordinator.record_plan("batch:a:0", positions, b"plan")
    coordinator.record_plan("batch:a:0", positions, b"plan")
    with pytest.raises(StorageError):
        coordinator.record_plan("batch:a:0", positions[:1], b"other")


async def test_a_restart_of_the_same_branch_remembers_what_was_trained(tmp_path: Path) -> None:
    first = opened(tmp_path)
    positions = [await accept_one(first, tmp_path, 1) for _ in range(3)]
    first.training_completed(0, 1, positions[:2])
    first.close()
    again = opened(tmp_path)
    assert (again.identity().trained, again.identity().pending) == (2, 1)
    again.close()
    other_branch = opened(tmp_path, branch="b")
    assert (other_branch.identity().trained, other_branch.identity().pending) == (0, 3)
    other_branch.close()


async def test_supply_ends_when_the_run_has_what_it_needs(coordinator: Coordinator, tmp_path: Path) -> None:
    for _ in range(4):
        await accept_one(coordinator, tmp_path, 1)
    assert coordinator.lease("w", 1).status is LeaseStatus.BACKPRESSURE
    coordinator.training_completed(0, 1, [0, 1, 2, 3])
    assert len(coordinator.lease("w", 5).work) == 2
    assert coordinator.lease("w", 1).status is LeaseStatus.DONE


async def test_waiting_ends_when_the_groups_are_there_or_the_time_is_up(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    assert await coordinator.wait_for_groups(1, 0.05) is None
    await accept_one(coordinator, tmp_path, 1)
    groups = await coordinator.wait_for_groups(1, 0.05)
    assert groups is not None
    assert len(groups) == 1
