"""Which engines a run starts, by its flags or by a file of served models."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.settings.groups import Settings
from vime.settings.parse import parse_settings
from vime.settings.placement import Demand
from vime.settings.refusals import refused
from vime.settings.rules.quantities import EngineWorkers, demand_of, engine_workers, num_own_engines, own_engines
from vime.settings.served_models import EngineSpec, model_names

FILE = """
vllm:
- name: ref
  model_path: /ref
  update_weights: false
  server_groups:
  - {worker_type: placeholder, num_gpus: 3, num_gpus_per_engine: 2}
  - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
- name: actor
  server_groups:
  - worker_type: regular
    num_gpus: 4
    num_gpus_per_engine: 2
    overrides: {pipeline-parallel-size: 2, max_model_len: 128, enable_prefix_caching: false, dtype: null,
                compilation_config: {level: 0}}
  - {worker_type: regular, num_gpus: 1, overrides: {enforce_eager: true}}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return with_file(tmp_path, FILE)


def with_file(folder: Path, content: str, words: str = "") -> Settings:
    (folder / "groups.yaml").write_text(content)
    return parse_settings(f"--vllm-config {folder / 'groups.yaml'} --hf-checkpoint /hf --vllm-seed-x 1 {words}".split())


def test_every_engine_has_its_model_its_devices_and_its_options(settings: Settings) -> None:
    given = ("--vllm-seed-x", "1")
    overrides = ("--vllm-pipeline-parallel-size", "2", "--vllm-max-model-len", "128", "--vllm-no-enable-prefix-caching")
    actor = EngineSpec(
        "actor", "/hf", 2, "regular", True, (*given, *overrides, "--vllm-compilation-config", '{"level": 0}')
    )
    assert own_engines(settings) == (
        EngineSpec("ref", "/ref", 2, "placeholder", False, given),
        EngineSpec("ref", "/ref", 1, "placeholder", False, given),
        EngineSpec("ref", "/ref", 2, "regular", False, given),
        actor,
        actor,
        EngineSpec("actor", "/hf", 1, "regular", True, (*given, "--vllm-enforce-eager")),
    )


def test_placeholders_hold_devices_and_start_no_engine(settings: Settings) -> None:
    assert demand_of(settings) == Demand((8,), (2, 1, 2, 2, 2, 1), engines_per_node=8)
    assert num_own_engines(settings) == 4


def test_the_trained_model_comes_first(settings: Settings) -> None:
    assert model_names(settings) == ("actor", "ref")
    assert model_names(parse_settings([])) == ("default",)


def test_sizes_of_a_group_go_before_those_of_all_engines(settings: Settings) -> None:
    assert engine_workers(own_engines(settings)[3]) == EngineWorkers(tensor=1, pipeline=2)
    assert engine_workers(own_engines(settings)[2]) == EngineWorkers(tensor=2)


def test_a_tensor_size_of_a_group_counts(tmp_path: Path) -> None:
    group = "{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, overrides: {tensor_parallel_size: 2}}"
    settings = with_file(tmp_path, f"vllm: [{{name: a, server_groups: [{group}]}}]")
    (spec,) = own_engines(settings)
    assert spec.vllm_args == ("--vllm-seed-x", "1")
    assert engine_workers(spec) == EngineWorkers(tensor=2)


def test_groups_that_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    groups = "[{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]"
    (row,) = refused(with_file(tmp_path, f"vllm: [{{name: a, server_groups: {groups}}}]"))
    assert row.startswith(f"--vllm-config {tmp_path}/groups.yaml (with groups of worker_type decode and prefill)")


@pytest.mark.parametrize("words", ["--colocate", "--offload-rollout"])
def test_models_of_the_file_may_take_turns_with_the_trainer(settings: Settings, tmp_path: Path, words: str) -> None:
    taking_turns = with_file(tmp_path, FILE, words)
    assert refused(taking_turns) == []
    assert own_engines(taking_turns) == own_engines(settings)
