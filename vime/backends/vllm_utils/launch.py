"""From the settings of one engine to the command and environment that start it. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vime.backends.vllm_utils.death import DIE_WITH_PARENT_ENV
from vime.backends.vllm_utils.plugin import WEIGHT_BACKEND, WORKER_EXTENSION
from vime.errors import SettingsError
from vime.settings.owned_options import OWNED_VLLM_OPTIONS, option_name

_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that one engine is started from.

    `extra_args` are vLLM options without the `vllm` prefix (see `arguments.split_vllm_flags`). `dtype` None leaves
    the choice to vime: float32 on a CPU, vLLM's own on a GPU.
    """

    hf_checkpoint: Path
    host: str
    port: int
    log_path: Path
    run_id: str
    seed: int = 0
    tensor_size: int = 1
    dtype: str | None = None
    max_model_len: int | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    cpu_kv_cache_gib: int = 1
    cpu_threads: int = 1
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineCommand:
    """The command line, and the variables to add to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def engine_command(launch: EngineLaunch) -> EngineCommand:
    """Command and environment of the engine.

    Raises `SettingsError` when `extra_args` sets something that vime sets itself.
    """
    user = user_options(launch.extra_args)
    argv = [sys.executable, "-m", _MODULE, "--model", str(launch.hf_checkpoint)]
    argv += ["--served-model-name", launch.hf_checkpoint.name or "policy"]
    argv += ["--host", launch.host, "--port", str(launch.port), "--seed", str(launch.seed)]
    argv += ["--tensor-parallel-size", str(launch.tensor_size), "--logprobs-mode", "processed_logprobs"]
    argv += ["--weight-transfer-config", f'{{"backend": "{WEIGHT_BACKEND}"}}']
    argv += ["--worker-extension-cls", WORKER_EXTENSION]
    argv += ["--enable-scale-out", "--enable-prompt-tokens-details"]
    if launch.max_model_len is not None and "max-model-len" not in user:
        argv += ["--max-model-len", str(launch.max_model_len)]
    if "enable-prefix-caching" not in user:
        argv += ["--enable-prefix-caching"]
    dtype = launch.dtype or ("float32" if launch.device == "cpu" else None)
    if dtype is not None and "dtype" not in user:
        argv += ["--dtype", dtype]
    if launch.device == "cpu":
        argv += _cpu_layout(launch, user)
    return EngineCommand(tuple(argv) + launch.extra_args, _environment(launch))


def user_options(extra_args: Sequence[str]) -> frozenset[str]:
    """Names of the options in `extra_args`, without dashes and without a leading `no-`.

    Raises `SettingsError` for one that vime sets itself.
    """
    names = set()
    for argument in extra_args:
        if not argument.startswith("--"):
            continue
        name = option_name(argument)
        if name in OWNED_VLLM_OPTIONS:
            raise SettingsError(
                f"--vllm-{name} can't be set: vime sets vLLM's --{name} itself.",
                next_step=f"Remove the flag. {OWNED_VLLM_OPTIONS[name]}",
            )
        names.add(name)
    return frozenset(names)


def _cpu_layout(launch: EngineLaunch, user: frozenset[str]) -> list[str]:
    # Measured on two cores with a tiny model: without a worker process and without compilation an engine is ready in
    # half the time, and one OpenMP thread serves three times the requests of two beside a busy core.
    argv = [] if "enforce-eager" in user else ["--enforce-eager"]
    if launch.tensor_size == 1 and "distributed-executor-backend" not in user:
        argv += ["--distributed-executor-backend", "uni"]
    return argv


def _environment(launch: EngineLaunch) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VIME_RUN_ID": launch.run_id,
        DIE_WITH_PARENT_ENV: "1",
    }
    if launch.device == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(launch.cpu_kv_cache_gib)
        env["OMP_NUM_THREADS"] = str(launch.cpu_threads)
        env["TORCH_COMPILE_DISABLE"] = "1"  # a few helpers of the sampler would otherwise be compiled, with g++
        if launch.tensor_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM's condition for running without a worker process
    return env
