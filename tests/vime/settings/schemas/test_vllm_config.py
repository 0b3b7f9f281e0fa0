"""`--vllm-config`."""

from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.parse import parse_settings
from vime.settings.schemas.vllm_config import read_vllm_config, vllm_config_warnings

DOCUMENTED = """
vllm:
  - name: actor
    update_weights: true # receives weight updates from training (default)
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4
  - name: ref
    model_path: /path/to/ref_model
    update_weights: false # frozen, no weight updates
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2
"""
SETTINGS = parse_settings([])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "vllm.yaml"


def one_group(group: str) -> str:
    return f"vllm: [{{name: a, server_groups: [{{{group}}}]}}]"


def test_models_groups_and_gpus_of_the_documented_file(file: Path) -> None:
    file.write_text(DOCUMENTED)
    config = read_vllm_config(str(file), SETTINGS)
    assert config.num_gpus == 12
    assert config.trained_model is config.vllm[0]
    assert config.vllm[1].model_path == "/path/to/ref_model"
    assert vllm_config_warnings(str(file), read_vllm_config(str(file), SETTINGS)) == []


def test_a_group_takes_its_engine_size_from_the_flag(file: Path) -> None:
    file.write_text(one_group("worker_type: regular, num_gpus: 8"))
    settings = parse_settings(["--rollout-num-gpus-per-engine", "4"])
    assert read_vllm_config(str(file), settings).vllm[0].server_groups[0].num_gpus_per_engine == 4


def test_only_the_first_updatable_model_is_trained(file: Path) -> None:
    group = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    file.write_text(f"vllm: [{{name: a, update_weights: false, {group}}}, {{name: b, {group}}}, {{name: c, {group}}}]")
    trained = read_vllm_config(str(file), SETTINGS).trained_model
    assert trained is not None
    assert trained.name == "b"
    (warning,) = vllm_config_warnings(str(file), read_vllm_config(str(file), SETTINGS))
    assert "vllm[2] 'c' keeps its weights: only the first updatable model, 'b', is trained" in warning


def test_placeholders_count_as_gpus_and_groups_may_set_parallel_sizes(file: Path) -> None:
    groups = """
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 4, overrides: {data_parallel_size: 2}}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4,
         overrides: {tensor_parallel_size: 2, pipeline_parallel_size: 2, max_num_seqs: 64}}
      - {worker_type: placeholder, num_gpus: 3}
"""
    file.write_text(f"vllm:\n  - name: a\n    server_groups:{groups}")
    assert read_vllm_config(str(file), parse_settings(["--rollout-num-gpus", "11"])).num_gpus == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm: []", "vllm is empty"),
        ("vllm: [{name: a, server_groups: []}]", r"vllm\[0\]\.server_groups is empty"),
        ("vllm: [{name: a}]", r"vllm\[0\] has no server_groups"),
        (one_group("worker_type: big, num_gpus: 1"),
         r"server_groups\[0\]\.worker_type is 'big', allowed: regular, prefill, decode, placeholder"),
        (one_group("worker_type: regular, num_gpus: many"), r"\.num_gpus is 'many', allowed: a whole number"),
        (one_group("worker_type: regular, num_gpus: 0"), r"server_groups\[0\]\.num_gpus is 0, allowed: 1 or more"),
        (one_group("worker_type: regular, num_gpus: 3, num_gpus_per_engine: 2"), "allowed: a multiple of 2"),
        (one_group("worker_type: regular, num_gpus: 2, num_gpus_per_engine: 0"), "num_gpus_per_engine is 0"),
        (one_group("worker_type: regular, num_gpu: 3"),
         r"server_groups\[0\] has the unknown key num_gpu, allowed: .*; the nearest one is num_gpus"),
        (one_group("worker_type: prefill, num_gpus: 1"), "has prefill engines and no decode engines"),
        (one_group("worker_type: regular, num_gpus: 1, overrides: {logprobs_mode: raw}"),
         r"overrides\.logprobs_mode can't be set: vime sets it itself"),
        (one_group("worker_type: regular, num_gpus: 1, overrides: {model: x}"), r"overrides\.model can't be set"),
        (one_group("worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4, overrides: {tensor_parallel_size: 2}"),
         "have parallel sizes of 2 GPUs in all, allowed: 4"),
        (one_group("worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4, overrides: {data_parallel_size: 3}"),
         "have parallel sizes of 3, allowed: a divisor of 4"),
        (one_group("worker_type: placeholder, num_gpus: 4, overrides: {dtype: float32}"), "is given for a placeholder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_vllm_config(str(file), SETTINGS)
    assert str(file) in caught.value.message
    assert caught.value.next_step


def test_names_are_unique(file: Path) -> None:
    group = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    file.write_text(f"vllm: [{{name: a, {group}}}, {{name: a, {group}}}]")
    with pytest.raises(SettingsError, match=r"vllm\[1\]\.name is 'a' again"):
        read_vllm_config(str(file), SETTINGS)


def test_gpus_add_up_to_the_flag(file: Path) -> None:
    file.write_text(DOCUMENTED)
    with pytest.raises(SettingsError, match="the groups have 12 GPUs in all, but --rollout-num-gpus is 8"):
        read_vllm_config(str(file), parse_settings(["--rollout-num-gpus", "8"]))
