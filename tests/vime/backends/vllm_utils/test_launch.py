"""The command and environment that an engine is started with."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from vime.backends.vllm_utils.launch import EngineLaunch, EnginePart, engine_command
from vime.backends.vllm_utils.plugin import FP32_RESIDUAL_ENV
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.wire_columns import CAPTURE_ENV
from vime.errors import SettingsError

LAUNCH = EngineLaunch(Path("/models/tiny"), "127.0.0.1", 8000, Path("/tmp/engine.log"), "run", seed=7)


def value(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_what_training_relies_on_is_always_set() -> None:
    argv = engine_command(LAUNCH).argv
    assert value(argv, "--logprobs-mode") == "processed_logprobs"
    assert value(argv, "--weight-transfer-config") == '{"backend": "vime"}'
    assert value(argv, "--seed") == "7"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details", "--enable-prefix-caching"} <= set(argv)


def test_requests_for_samples_leave_no_line_each_in_the_log_unless_the_user_says_what_is_logged() -> None:
    quiet = value(engine_command(LAUNCH).argv, "--disable-access-log-for-endpoints").split(",")
    assert {"/inference/v1/sample", "/inference/v1/sample_stream", "/inference/v1/generate", "/metrics"} <= set(quiet)
    for words in (("--no-disable-uvicorn-access-log",), ("--disable-access-log-for-endpoints", "/ping")):
        argv = engine_command(replace(LAUNCH, extra_args=words)).argv
        assert argv.count("--disable-access-log-for-endpoints") == (words[0] == "--disable-access-log-for-endpoints")


@pytest.mark.parametrize(("version", "is_there"), [("0.26.0", False), ("0.32.0+cpu", True)])
def test_generation_from_token_ids_is_switched_on_where_vllm_has_a_switch(
    monkeypatch: pytest.MonkeyPatch, version: str, is_there: bool
) -> None:
    monkeypatch.setattr("vime.backends.vllm_utils.launch.installed_version", lambda _name: version)
    assert ("--enable-scale-out" in engine_command(LAUNCH).argv) == is_there


@pytest.mark.parametrize("words", [("--speculative_config.method=x",), ("--spec-method", "x", "--spec-tokens", "3")])
def test_an_engine_that_drafts_tells_of_each_request_what_it_accepted(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, drafts = "--per-request-spec-decode-metrics", replace(LAUNCH, extra_args=words)
    monkeypatch.setattr("vime.backends.vllm_utils.launch.installed_version", lambda _name: "0.32.0")
    assert option not in engine_command(LAUNCH).argv, "vLLM refuses it where nothing is drafted"
    assert value(engine_command(drafts).argv, option) == "summary"
    chosen = engine_command(replace(drafts, extra_args=(*drafts.extra_args, option, "detailed"))).argv
    assert (chosen.count(option), value(chosen, option)) == (1, "detailed")
    monkeypatch.setattr("vime.backends.vllm_utils.launch.installed_version", lambda _name: "0.26.0")
    assert option not in engine_command(drafts).argv


def test_a_cpu_engine_computes_in_float32_unless_told_otherwise() -> None:
    assert value(engine_command(LAUNCH).argv, "--dtype") == "float32"
    chosen = engine_command(replace(LAUNCH, extra_args=("--dtype", "bfloat16"))).argv
    assert chosen.count("--dtype") == 1
    assert value(chosen, "--dtype") == "bfloat16"
    assert "--dtype" not in engine_command(replace(LAUNCH, device="gpu")).argv


def test_prefix_caching_can_be_switched_off() -> None:
    argv = engine_command(replace(LAUNCH, extra_args=("--no-enable-prefix-caching",))).argv
    assert "--enable-prefix-caching" not in argv
    assert argv[-1] == "--no-enable-prefix-caching"


def test_strict_parity_puts_head_and_residual_stream_in_float32_and_caches_no_prefix() -> None:
    command = engine_command(replace(LAUNCH, strict_parity=True))
    assert value(command.argv, "--hf-overrides") == '{"head_dtype": "float32"}'
    assert {"--no-enable-prefix-caching", "--no-async-scheduling"} <= set(command.argv)
    assert "--enable-prefix-caching" not in command.argv
    assert command.env[FP32_RESIDUAL_ENV] == "1"
    default = engine_command(LAUNCH)
    assert "--hf-overrides" not in default.argv
    assert FP32_RESIDUAL_ENV not in default.env


@pytest.mark.parametrize("extra", [("--enable-prefix-caching",), ("--hf-overrides", "{}"), ("--async-scheduling",)])
def test_what_strict_parity_sets_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"--vllm-\S+ can't be set with --backend-parity strict"):
        engine_command(replace(LAUNCH, strict_parity=True, extra_args=extra))


def test_a_length_given_by_flag_wins() -> None:
    argv = engine_command(replace(LAUNCH, max_model_len=256, extra_args=("--max-model-len", "64"))).argv
    assert argv.count("--max-model-len") == 1
    assert value(argv, "--max-model-len") == "64"


def test_one_cpu_worker_needs_no_process_of_its_own() -> None:
    alone = engine_command(LAUNCH)
    assert value(alone.argv, "--distributed-executor-backend") == "uni"
    assert alone.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    two = engine_command(replace(LAUNCH, tensor_size=2, num_workers=2))
    assert "--distributed-executor-backend" not in two.argv
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in two.env


def test_a_gpu_engine_gets_no_cpu_settings() -> None:
    command = engine_command(replace(LAUNCH, device="gpu"))
    assert "--enforce-eager" not in command.argv
    assert "VLLM_CPU_KVCACHE_SPACE" not in command.env
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    "extra",
    [("--logprobs-mode", "raw_logits"), ("--port=1",), ("--weight_transfer_config.backend", "nccl"), ("--seed", "1")],
)
def test_an_option_that_vime_sets_itself_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"--vllm-.* can't be set: vime sets vLLM's .* itself"):
        engine_command(replace(LAUNCH, extra_args=extra))


def test_the_engine_returns_as_many_candidates_as_requests_ask_for() -> None:
    head = replace(LAUNCH, columns=SampleColumns(num_candidates=128))
    assert value(engine_command(head).argv, "--max-logprobs") == "129"
    given = engine_command(replace(head, extra_args=("--max-logprobs", "200"))).argv
    assert given.count("--max-logprobs") == 1
    for few in (NO_COLUMNS, SampleColumns(num_candidates=8)):
        assert "--max-logprobs" not in engine_command(replace(LAUNCH, columns=few)).argv


def test_routes_are_captured_by_the_plug_in_on_a_cpu_and_by_vllm_on_a_gpu() -> None:
    wanted = replace(LAUNCH, columns=SampleColumns(routes=True))
    on_cpu, on_gpu = engine_command(wanted), engine_command(replace(wanted, device="gpu"))
    assert ("--enable-return-routed-experts" in on_cpu.argv, on_cpu.env[CAPTURE_ENV]) == (False, "routes")
    assert ("--enable-return-routed-experts" in on_gpu.argv, on_gpu.env[CAPTURE_ENV]) == (True, "")
    assert engine_command(LAUNCH).env[CAPTURE_ENV] == ""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_nuclei_are_captured_by_the_plug_in_from_the_first_model_runner(device: Literal["cpu", "gpu"]) -> None:
    command = engine_command(replace(LAUNCH, device=device, columns=SampleColumns(nucleus=True)))
    assert (command.env[CAPTURE_ENV], command.env["VLLM_USE_V2_MODEL_RUNNER"]) == ("nucleus", "0")
    assert ("--no-async-scheduling" in command.argv) == (device == "gpu")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_command(replace(LAUNCH, device=device)).env


def test_other_plug_ins_of_vllm_stay_loaded_beside_vimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = engine_command(LAUNCH).env["VLLM_PLUGINS"].split(",")
    general = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert set(found) >= {"vime", *general}
    monkeypatch.setenv("VLLM_PLUGINS", "mine,vime")
    assert engine_command(LAUNCH).env["VLLM_PLUGINS"] == "mine,vime"


def test_parts_of_an_engine_meet_at_its_first_node_and_only_that_one_serves() -> None:
    parts = [replace(LAUNCH, tensor_size=4, num_workers=4, part=EnginePart(n, 2, "10.0.0.1", 29500)) for n in (0, 1)]
    first, second = (engine_command(replace(part, host=f"10.0.0.{n + 1}")) for n, part in enumerate(parts))
    for number, command in enumerate((first, second)):
        assert value(command.argv, "--nnodes") == "2"
        assert value(command.argv, "--node-rank") == str(number)
        assert (value(command.argv, "--master-addr"), value(command.argv, "--master-port")) == ("10.0.0.1", "29500")
        assert value(command.argv, "--tensor-parallel-size") == "4"
        assert command.env["VLLM_HOST_IP"] == f"10.0.0.{number + 1}"
    assert "--headless" not in first.argv
    assert "--headless" in second.argv
    assert "vime.backends.vllm_utils.headless" in second.argv


def test_several_cpu_workers_are_processes_of_their_own() -> None:
    command = engine_command(
        replace(LAUNCH, tensor_size=1, num_workers=2, extra_args=("--pipeline-parallel-size", "2"))
    )
    assert "uni" not in command.argv
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command.env
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_an_engine_that_sleeps_is_started_so() -> None:
    assert "--enable-sleep-mode" in engine_command(replace(LAUNCH, sleeps=True, device="gpu")).argv
    assert "--enable-sleep-mode" not in engine_command(replace(LAUNCH, sleeps=True)).argv, "a CPU has nothing to leave"
    assert "--enable-sleep-mode" not in engine_command(replace(LAUNCH, device="gpu")).argv
