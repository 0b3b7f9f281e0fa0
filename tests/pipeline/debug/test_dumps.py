"""Each planned batch becomes one file: an archive of what is stored, or the samples themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.wide_groups import lease_bytes
from pipeline.debug.dumps import RolloutDumps
from pipeline.debug.stored import StoredRollouts
from pipeline.optional_records import OptionalRecords
from pipeline.packing import PackingSettings
from pipeline.planner import BatchPlan, PlanSettings, plan_batch
from storage.archive import OWN_POOL, RolloutArchive
from storage.columns import encode_group
from storage.contracts import PayloadPool
from storage.debug_samples import read_pt
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.retention import Retention
from storage.summary import summarize
from vime.errors import StorageError
from vime.utils.types import Sample

SETTINGS = PlanSettings(
    rollout_batch_size=2,
    rollouts_per_step=4,
    packing=PackingSettings(num_ranks=1, max_tokens=40),
    normalize_rewards=True,
    normalize_std=False,
)


def group(number: int) -> list[Sample]:
    return [
        Sample(
            group_index=number,
            index=2 * number + member,
            tokens=[1, 2, 3],
            response_length=2,
            reward=float(member),
            rollout_log_probs=[-0.5, -0.25],
            version_spans=[(1, 0, 2)],
            status=Sample.Status.COMPLETED,
        )
        for member in range(2)
    ]


GROUPS = [group(0), group(1)]


def planned(pool: PayloadPool, branch: str = "first") -> BatchPlan:
    items = [(encode_group(members), lease_bytes(number)) for number, members in enumerate(GROUPS)]
    refs = pool.publish_groups(items, submission_id=branch)
    accepted = [
        AcceptedGroup(10 + number, number, ref, summarize(members))
        for number, (ref, members) in enumerate(zip(refs, GROUPS, strict=True))
    ]
    return plan_batch(accepted, SETTINGS, branch=branch, rollout_id=7, policy_version=1)


async def test_an_archive_of_a_batch_names_its_groups_and_keeps_them(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        plan = planned(pool)
        dumps = RolloutDumps(f"{tmp_path}/{{rollout_id}}.straw.json", lambda: Pool.open(tmp_path / "pool"), print)
        await dumps.save(plan)
        assert Retention(pool.control_dir).retained_packs() == {found.ref.path for found in plan.groups}
    with RolloutArchive.open(tmp_path / "7.straw.json") as archive:
        assert archive.rollout_id == 7
        assert [found.position for found in archive.index.groups] == [10, 11]
        assert archive.load_samples() == GROUPS[0] + GROUPS[1]


async def test_a_resumed_run_leaves_the_archive_of_the_session_before(tmp_path: Path) -> None:
    notes: list[str] = []
    with Pool.create(tmp_path / "pool", "run") as pool:
        dumps = RolloutDumps(
            f"{tmp_path}/{{rollout_id}}.straw.json", lambda: Pool.open(tmp_path / "pool"), notes.append
        )
        first, second = planned(pool), planned(pool, "second")
        await dumps.save(first)
        before = (tmp_path / "7.straw.json").read_bytes()
        await dumps.save(first)
        assert notes == []
        await dumps.save(second)
    assert (tmp_path / "7.straw.json").read_bytes() == before
    assert "is of an earlier session and stays; this one's samples are in 7.second.straw.json" in notes[0]
    with RolloutArchive.open(tmp_path / "7.second.straw.json") as archive:
        assert [found.ref for found in archive.index.groups] == [found.ref for found in second.groups]


async def test_an_archive_of_a_queue_in_memory_has_a_pool_beside_it(tmp_path: Path) -> None:
    memory = MemoryPool("run", PartTable[bytes]())
    await RolloutDumps(f"{tmp_path}/{{rollout_id}}.straw.json", lambda: memory, print).save(planned(memory))
    with RolloutArchive.open(tmp_path / "7.straw.json") as archive:
        assert archive.pool.root == tmp_path / OWN_POOL / "pool"
        assert archive.load_samples() == GROUPS[0] + GROUPS[1]


async def test_a_pt_file_holds_the_samples_of_a_batch(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        plan = planned(pool)
        await RolloutDumps(f"{tmp_path}/{{rollout_id}}.pt", lambda: Pool.open(tmp_path / "pool"), print).save(plan)
    assert read_pt(tmp_path / "7.pt") == GROUPS[0] + GROUPS[1]


@pytest.mark.parametrize("ending", [".pt", ".straw.json"])
async def test_what_was_removed_from_a_batch_is_removed_in_its_file(tmp_path: Path, ending: str) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        plan = planned(pool)
        samples = [msgspec.structs.replace(s, removed=s.sample_index == 3) for s in plan.samples]
        dumps = RolloutDumps(f"{tmp_path}/{{rollout_id}}{ending}", lambda: Pool.open(tmp_path / "pool"), print)
        await dumps.save(msgspec.structs.replace(plan, samples=samples))
    stored = StoredRollouts(
        str(tmp_path / f"7{ending}"),
        scratch=tmp_path / "scratch",
        group_size=2,
        encode=encode_group,
        check=lambda _: None,
    )
    with stored:
        assert [group.summary.mask_sums for group in stored.batch(7)] == [[2, 2], [2, 0]]


async def test_a_file_that_can_not_be_written_is_noted_where_a_run_can_do_without(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file in the way")
    records = OptionalRecords()
    with Pool.create(tmp_path / "pool", "run") as pool:
        dumps = RolloutDumps(f"{tmp_path}/out/{{rollout_id}}.pt", lambda: Pool.open(tmp_path / "pool"), print, records)
        await dumps.save(planned(pool))
        with pytest.raises(StorageError):
            await RolloutDumps(f"{tmp_path}/out/{{rollout_id}}.pt", lambda: pool, print).save(planned(pool))
    assert [each.record for each in records.unwritten] == ["dump of rollout data"]


async def test_without_a_template_nothing_is_read(tmp_path: Path) -> None:
    def refuse() -> PayloadPool:
        raise AssertionError("no pool is needed")

    with Pool.create(tmp_path / "pool", "run") as pool:
        await RolloutDumps(None, refuse, print).save(planned(pool))
