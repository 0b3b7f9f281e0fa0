"""Where ranks and engines are placed, by the documented allocation flags."""

from pathlib import Path

import pytest

from pipeline.preview.process_map import Device, Machines, ProcessMap, assumed_machines, map_processes
from tests.pipeline.preview.planned import settings_of
from vime.errors import SettingsError


def mapped(folder: Path, *more: str, gpus: int = 16) -> ProcessMap:
    settings = settings_of(folder, *more)
    return map_processes(settings, assumed_machines(settings, gpus))


def test_engines_come_behind_the_ranks_and_fill_the_next_node(tmp_path: Path) -> None:
    placed = mapped(
        tmp_path, "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4"
    )
    assert placed.shape == "separate"
    assert placed.num_devices == 16
    assert [place.device for place in placed.trainers] == [Device(0, gpu) for gpu in range(8)]
    assert [engine.devices for engine in placed.engines] == [
        tuple(Device(1, gpu) for gpu in range(4)),
        tuple(Device(1, gpu) for gpu in range(4, 8)),
    ]


def test_ranks_carry_megatrons_coordinates(tmp_path: Path) -> None:
    placed = mapped(
        tmp_path, "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size", "2",
    )  # fmt: skip
    assert (placed.sizes.tensor, placed.sizes.pipeline, placed.sizes.data) == (2, 2, 2)
    coordinates = [(place.tensor, place.data, place.pipeline) for place in placed.trainers]
    assert coordinates == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


def test_colocated_engines_take_as_many_gpus_as_train_and_share_them(tmp_path: Path) -> None:
    placed = mapped(tmp_path, "--actor-num-gpus-per-node", "4", "--actor-num-nodes", "2", "--colocate")
    assert placed.shape == "colocated"
    assert placed.num_devices == 8
    assert len(placed.engines) == 8
    assert [engine.devices[0] for engine in placed.engines] == [place.device for place in placed.trainers]
    assert placed.trainers[4].device == Device(1, 0), "a colocated node has --actor-num-gpus-per-node GPUs"
    assert "leaves the devices' memory" in placed.words
    assert "Engines sleep" in placed.words


def test_release_train_is_said(tmp_path: Path) -> None:
    assert "start from a checkpoint for each step" in mapped(tmp_path, "--release-train").words


def test_engines_of_others_need_no_device(tmp_path: Path) -> None:
    placed = mapped(tmp_path, "--rollout-external-engine-addrs", "a:1", "b:2")
    assert placed.num_devices == 1
    assert [engine.address for engine in placed.engines] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("flag", "ranks", "engines"), [("--debug-rollout-only", 0, 2), ("--debug-train-only", 4, 0)]
)  # fmt: skip
def test_one_half_alone_leaves_the_other_without_devices(tmp_path: Path, flag: str, ranks: int, engines: int) -> None:
    placed = mapped(tmp_path, "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "2", flag)
    assert (len(placed.trainers), len(placed.engines), placed.num_devices) == (ranks, engines, ranks + engines)
    assert all(device.gpu == number for number, engine in enumerate(placed.engines) for device in engine.devices)


@pytest.mark.parametrize(("width", "devices", "across"), [("4", {1}, []), ("16", {1, 2}, [0])])
def test_only_an_engine_larger_than_a_node_lies_across_nodes(
    tmp_path: Path, width: str, devices: set[int], across: list[int]
) -> None:
    words = ["--actor-num-gpus-per-node", "6", "--rollout-num-gpus", width, "--rollout-num-gpus-per-engine", width]
    placed = mapped(tmp_path, *words, gpus=24)
    assert {device.node for device in placed.engines[0].devices} == devices
    assert placed.engines_across_nodes == across


def test_what_does_not_fit_is_numbered_on(tmp_path: Path) -> None:
    placed = mapped(tmp_path, "--actor-num-gpus-per-node", "6", "--rollout-num-gpus", "4", gpus=8)
    assert placed.num_devices == 10
    assert [engine.devices for engine in placed.engines] == [
        (Device(0, 6),), (Device(0, 7),), (Device(1, 0),), (Device(1, 1),)
    ]  # fmt: skip


def test_ranks_that_do_not_fit_the_parallel_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="3 trainer ranks, but tensor 2"):
        mapped(tmp_path, "--actor-num-gpus-per-node", "3", "--tensor-model-parallel-size", "2")


def test_this_machine_is_one_node(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "--actor-num-gpus-per-node", "9")
    placed = map_processes(settings, Machines(16, 16, "worker process"))
    assert {place.device.node for place in placed.trainers} == {0}


def test_records_are_trained_by_ranks_alone(tmp_path: Path) -> None:
    placed = mapped(tmp_path, "--actor-num-gpus-per-node", "4", "--loss-type", "sft_loss")
    assert placed.shape == "training only"
    assert (len(placed.trainers), len(placed.engines), placed.num_devices) == (4, 0, 4)


def test_engines_that_prefill_are_named(tmp_path: Path) -> None:
    placed = mapped(tmp_path, "--rollout-num-gpus", "3", "--prefill-num-servers", "1")
    assert [engine.kind for engine in placed.engines] == ["prefill", "decode", "decode"]
