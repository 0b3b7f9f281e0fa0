"""The parts of the suite at the size of a node run in small on a CPU; their layouts, jobs and formulas."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import stream as one_stream
from benchmarks.gpu.node import colocation, layouts, publication, stream
from benchmarks.gpu.node.jobs import STANDIN_RUN
from benchmarks.gpu.part import Stages
from benchmarks.gpu.smokes import STEPS
from tests.benchmarks.slow_parts import slow_part
from tests.pipeline.publication_rig import Rig, digest_of, is_running
from tests.support.standin_engine import StandinEngine
from vime.errors import EngineUnavailable, SettingsError
from vime.settings.groups import Settings
from vime.settings.resolve import resolve
from vime.settings.validate import validate


def small(folder: Path, gpus: int = 0) -> Stages:
    """A call of any length."""
    return Stages(folder, small=True, gpus=gpus)


def valid(command: Sequence[str]) -> Settings:
    """Settings of a job's command; raises `SettingsError` for one that would be refused."""
    words = list(command)
    settings = resolve(words[words.index(STANDIN_RUN if STANDIN_RUN in words else "train") + 1 :]).settings
    validate(settings)
    return settings


@pytest.mark.parametrize("gpus", [0, 2, 4, 8])
def test_jobs_are_valid_and_fit_on_every_kind_of_machine(tmp_path: Path, gpus: int) -> None:
    stages = small(tmp_path, gpus)
    one_stream.prepare(tmp_path, one_stream.SMALL)
    for size in stream.sizes_of(gpus):
        for variant in stream.VARIANTS:
            settings = valid(stream.variant_command(stages, variant, size))
            assert settings.cluster.num_trainer_ranks == settings.cluster.num_engines == size
            assert not gpus or 2 * size <= gpus
    for name, layout in colocation.JOBS.items():
        cluster = valid(colocation.turns_command(stages, name)).cluster
        rollout_gpus = 0 if cluster.colocate else cluster.num_rollout_gpus
        assert not gpus or cluster.num_trainer_ranks + rollout_gpus <= gpus
        assert (cluster.num_engines == 1) == (layout.one_engine or (gpus == 2 and name == "ppo"))


@pytest.mark.parametrize("part", [layouts.worlds_of, publication.fleets_of, stream.sizes_of])
def test_a_single_gpu_is_refused(part: object) -> None:
    with pytest.raises(SettingsError, match="found 1, allowed: 2 or more, or none"):
        part(1)


@pytest.mark.parametrize(
    ("gpus", "worlds", "fleets", "sizes"),
    [
        (0, (4, 8), ("2x1", "4x1", "2x2"), (1, 2, 4)),
        (2, (2,), ("1x1",), (1,)),
        (4, (4,), ("2x1", "1x2"), (1, 2)),
        (8, (4, 8), ("2x1", "4x1", "2x2"), (1, 2, 4)),
    ],
)
def test_a_machine_runs_what_it_has_room_for(
    gpus: int, worlds: tuple[int, ...], fleets: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    assert (layouts.worlds_of(gpus), publication.fleets_of(gpus), stream.sizes_of(gpus)) == (worlds, fleets, sizes)
    workers = [math.prod(publication.size_of(fleet)) for fleet in fleets]
    assert not gpus or publication.ranks_of(gpus) + max(workers) <= gpus


def test_layouts_are_named_by_their_sizes_and_a_chain_never_repeats_one_at_once() -> None:
    short = {"tp": "--tensor-model", "pp": "--pipeline-model", "cp": "--context", "ep": "--expert-model"}
    for ranks, of_world in layouts.LAYOUTS.items():
        for name, argv in of_world.items():
            sizes = dict.fromkeys(short, "1")
            sizes |= {
                letters: argv[argv.index(f"{flag}-parallel-size") + 1]
                for letters, flag in short.items()
                if f"{flag}-parallel-size" in argv
            }
            rest = ranks // math.prod(int(sizes[letters]) for letters in ("tp", "pp", "cp"))
            words = [f"{letters}{size}" for letters, size in sizes.items() if size != "1"]
            words += [f"dp{rest}"] if "--use-distributed-optimizer" in argv else []
            assert name.removeprefix("moe_") == "_".join(words)
            assert rest * int(sizes["tp"]) * int(sizes["cp"]) % int(sizes["ep"]) == 0
    for chains in layouts.CHAINS.values():
        for name, links in chains.items():
            assert all(one != other for one, other in itertools.pairwise(links))
            assert all(("ep" in link) == ("spread" in name) for link in links)


def test_hashing_counts_groups_that_move_without_need_and_those_that_come_back() -> None:
    before, without, after = ["a", "b", "a", "c"], ["a", "c", "c", "c"], ["a", "b", "c", "c"]
    found = publication.hashing(before, without, after, lost="b", num_engines=3)
    assert found == pytest.approx({"hash_moved_share": 1 / 3, "hash_back_share": 3 / 4, "hash_spread": 2 * 3 / 4})


def test_scaling_is_told_against_one_trainer_and_one_engine() -> None:
    found = {"at1_stream_tokens_per_s": 100.0, "at2_stream_tokens_per_s": 190.0, "at4_stream_tokens_per_s": 300.0}
    assert stream.scaling(found, (1, 2, 4)) == {"scaling_2": 0.95, "scaling_4": 0.75}
    assert stream.scaling(found, (1,)) == {}


async def test_every_worker_of_an_engine_receives_a_publication() -> None:
    with StandinEngine(num_workers=2) as pair, StandinEngine() as single:
        async with Rig([pair, single]) as rig:
            publication = await rig.publish()
            assert publication.raised
            assert [worker.version for worker in await rig.clients[0].staging()] == [1, 1]
            assert pair.weights_digest == single.weights_digest == digest_of(rig.trainer)


async def test_running_requests_of_a_standin_that_dies_lose_their_connection() -> None:
    with StandinEngine() as engine:
        engine.faults.step_s = 0.02
        async with Rig([engine]) as rig:
            asking = rig.generate(max_tokens=2000)
            await is_running(rig)
            engine.die()
            with pytest.raises(EngineUnavailable):
                await asyncio.wait_for(asking, 10)


@slow_part(timeout_s=1800)
def test_layouts_of_four_and_eight_ranks_in_bf16_train_like_one_and_resume_each_other(tmp_path: Path) -> None:
    values = layouts.measure(small(tmp_path))
    assert values["outside"] == 0, values
    assert values["moved"] > 0.05
    expected = {name for world in (4, 8) for name in (*layouts.LAYOUTS[world], *layouts.CHAINS[world])}
    assert {f"{name}_grad_norm" for name in expected} <= values.keys()


@slow_part()
def test_a_sharded_trainer_publishes_to_several_engines_and_the_loss_of_one_moves_no_other_group(
    tmp_path: Path,
) -> None:
    values = publication.measure(small(tmp_path))
    for fleet in publication.fleets_of(0):
        assert values[f"{fleet}_bytes"] == values["2x1_bytes"] > 0, "each is sent once"
        assert values[f"{fleet}_pause_s"] > 0
    assert values["loss_publications"] == 1, "the others get the version that the lost engine missed"
    assert values["loss_aborted"] > 0
    assert (values["hash_moved_share"], values["hash_back_share"]) == (0, 1)
    assert values["hash_spread"] < 3


@slow_part(timeout_s=1800)
def test_the_stream_runs_with_one_two_and_four_trainers_and_engines(tmp_path: Path) -> None:
    values = stream.measure(small(tmp_path))
    assert values["scaling_4"] == pytest.approx(
        values["at4_stream_tokens_per_s"] / values["at1_stream_tokens_per_s"] / 4
    )
    assert values["straw_over_memory"] == values["straw_step_s"] / values["memory_step_s"]


@slow_part(engine=True, timeout_s=1800)
def test_four_ranks_and_their_engines_take_turns_and_a_critic_is_offloaded(tmp_path: Path) -> None:
    values = colocation.measure(small(tmp_path))
    assert values["engines_sleeps"] >= STEPS
    assert values["engine_parity_mean"] < 1e-4
    assert values["ppo_value_loss"] > 0
    assert [values[f"{name}_{count}"] for name in colocation.JOBS for count in ("lost", "trained_twice")] == [0] * 6
