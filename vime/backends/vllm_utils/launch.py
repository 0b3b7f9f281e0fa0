"""From the settings of one engine to the command and environment that start it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vime.backends.vllm_utils.death import DIE_WITH_PARENT_ENV
from vime.backends.vllm_utils.plugin import FP32_RESIDUAL_ENV, PLUGIN, WEIGHT_BACKEND, WORKER_EXTENSION
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.wire_032 import GENERATE
from vime.backends.vllm_utils.wire_columns import CAPTURE_ENV, SAMPLE
from vime.backends.vllm_utils.wire_stream import STREAM
from vime.errors import SettingsError
from vime.settings.owned_options import OWNED_VLLM_OPTIONS, STRICT_PARITY_OPTIONS, option_name
from vime.versions import installed_version, version_at_least

_MODULE = "vllm.entrypoints.openai.api_server"
_HEADLESS_MODULE = "vime.backends.vllm_utils.headless"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Those that vLLM loads without being told to, as long as it isn't told of any."""

_DRAFT_METRICS = "per-request-spec-decode-metrics"
_DRAFT_OPTIONS = ("speculative-config", "spec-method", "spec-model", "spec-tokens")
"""Any of them makes vLLM draft."""

_FREQUENT_ROUTES = (SAMPLE, STREAM, GENERATE, "/health", "/metrics")
"""A line in the log for each request to these would fill the disk in weeks."""
_ACCESS_OPTIONS = frozenset({"disable-access-log-for-endpoints", "disable-uvicorn-access-log"})

_VLLM_MAX_LOGPROBS = 20
"""vLLM's default."""


@dataclass(frozen=True)
class EnginePart:
    """Which of an engine's nodes this is, counted from 0, of how many; and where the first one lets the others meet."""

    number: int
    num_parts: int
    master_address: str
    master_port: int


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that one engine, or its part on one node, is started from.

    `extra_args` are vLLM options without the `vllm` prefix (see `arguments.split_vllm_flags`). `dtype` None leaves
    the choice to vime: float32 on a CPU, vLLM's own on a GPU. `columns` are the most that requests will ask for.
    `num_workers` are those of the whole engine, of which `tensor_size` share each layer. An engine on several nodes has
    a `part` on each, and only that of the first listens on `host` and `port`. With `sleeps` the engine can leave its
    GPU's memory (vLLM's sleep mode); on a CPU there is nothing to leave. `strict_parity` is `--backend-parity strict`.
    """

    hf_checkpoint: Path
    host: str
    port: int
    log_path: Path
    run_id: str
    seed: int = 0
    tensor_size: int = 1
    num_workers: int = 1
    part: EnginePart | None = None
    sleeps: bool = False
    strict_parity: bool = False
    dtype: str | None = None
    max_model_len: int | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    cpu_kv_cache_gib: int = 1
    cpu_threads: int = 1
    extra_args: tuple[str, ...] = ()
    columns: SampleColumns = NO_COLUMNS


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
    if launch.strict_parity and (doubled := sorted(user.intersection(STRICT_PARITY_OPTIONS))):
        raise SettingsError(
            f"--vllm-{doubled[0]} can't be set with --backend-parity strict, which sets it itself.",
            next_step="Leave out one of the two.",
        )
    module = _HEADLESS_MODULE if launch.part is not None and launch.part.number else _MODULE
    argv = [sys.executable, "-m", module, "--model", str(launch.hf_checkpoint)]
    argv += ["--served-model-name", launch.hf_checkpoint.name or "policy"]
    argv += ["--host", launch.host, "--port", str(launch.port), "--seed", str(launch.seed)]
    argv += ["--tensor-parallel-size", str(launch.tensor_size), "--logprobs-mode", "processed_logprobs"]
    argv += _part(launch.part)
    argv += ["--weight-transfer-config", f'{{"backend": "{WEIGHT_BACKEND}"}}']
    argv += ["--worker-extension-cls", WORKER_EXTENSION]
    argv += ["--enable-prompt-tokens-details"]
    if user.isdisjoint(_ACCESS_OPTIONS):
        argv += ["--disable-access-log-for-endpoints", ",".join(_FREQUENT_ROUTES)]
    if version_at_least(installed_version("vllm") or "", (0, 32)):
        argv += ["--enable-scale-out"]  # before, generation from token ids needed no word
        if not user.isdisjoint(_DRAFT_OPTIONS) and _DRAFT_METRICS not in user:
            argv += [f"--{_DRAFT_METRICS}", "summary"]  # vLLM refuses it without speculative decoding
    if launch.max_model_len is not None and "max-model-len" not in user:
        argv += ["--max-model-len", str(launch.max_model_len)]
    if launch.strict_parity:
        argv += ["--no-enable-prefix-caching", "--no-async-scheduling"]
        argv += ["--hf-overrides", '{"head_dtype": "float32"}']
    elif "enable-prefix-caching" not in user:
        argv += ["--enable-prefix-caching"]
    dtype = launch.dtype or ("float32" if launch.device == "cpu" else None)
    if dtype is not None and "dtype" not in user:
        argv += ["--dtype", dtype]
    argv += _columns(launch, user)
    if launch.sleeps and launch.device == "gpu" and "enable-sleep-mode" not in user:
        argv += ["--enable-sleep-mode"]
    if launch.device == "cpu":
        argv += _cpu_layout(launch, user)
    return EngineCommand(tuple(argv) + launch.extra_args, _environment(launch))


def launch_record(launch: EngineLaunch, session: str) -> dict[str, str]:
    """What makes two engines alike, name by name: all but their port and their log, and the files of the checkpoint."""
    fields = {name: str(value) for name, value in vars(launch).items() if name not in ("port", "log_path", "part")}
    variables = {name: value for name, value in _environment(launch).items() if name != "VIME_RUN_ID"}
    return {
        "session id": session,
        **fields,
        **variables,
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        "python": sys.executable,
        "vllm": installed_version("vllm") or "none",
        "vime": installed_version("vime") or "none",
        "checkpoint files": _files_digest(launch.hf_checkpoint),
    }


def _files_digest(folder: Path) -> str:
    """Of names, sizes and times of the files in a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            found = path.stat()
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


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


def _part(part: EnginePart | None) -> list[str]:
    if part is None:
        return []
    place = ["--nnodes", str(part.num_parts), "--node-rank", str(part.number)]
    place += ["--master-addr", part.master_address, "--master-port", str(part.master_port)]
    return [*place, "--headless"] if part.number else place


def _columns(launch: EngineLaunch, user: frozenset[str]) -> list[str]:
    """vLLM's own options; what its model runner can't return is captured by the plug-in."""
    argv = []
    wanted = launch.columns
    if wanted.num_candidates >= _VLLM_MAX_LOGPROBS and "max-logprobs" not in user:
        argv += ["--max-logprobs", str(wanted.num_candidates + 1)]
    if wanted.routes and launch.device == "gpu":
        argv += ["--enable-return-routed-experts"]
    if wanted.nucleus and launch.device == "gpu" and "async-scheduling" not in user and not launch.strict_parity:
        argv += ["--no-async-scheduling"]  # the capture reads a step's results before the next one begins
    return argv


def _captured(launch: EngineLaunch) -> str:
    wanted = {"routes": launch.columns.routes and launch.device == "cpu", "nucleus": launch.columns.nucleus}
    return " ".join(name for name, is_captured in wanted.items() if is_captured)


def _plugins() -> str:
    """`VLLM_PLUGINS`: vLLM serves the routes of named plug-ins only, and then loads no other plug-in of any kind."""
    given = os.environ.get("VLLM_PLUGINS")
    if given is not None:
        return ",".join(dict.fromkeys([*given.split(","), PLUGIN]))
    found = [point.name for group in _PLUGIN_GROUPS for point in importlib.metadata.entry_points(group=group)]
    return ",".join(dict.fromkeys([*found, PLUGIN]))


def _cpu_layout(launch: EngineLaunch, user: frozenset[str]) -> list[str]:
    # Measured on two cores with a tiny model: without a worker process and without compilation an engine is ready in
    # half the time, and one OpenMP thread serves three times the requests of two beside a busy core.
    argv = [] if "enforce-eager" in user else ["--enforce-eager"]
    if launch.num_workers == 1 and "distributed-executor-backend" not in user:
        argv += ["--distributed-executor-backend", "uni"]
    return argv


def _environment(launch: EngineLaunch) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_PLUGINS": _plugins(),
        "VIME_RUN_ID": launch.run_id,
        CAPTURE_ENV: _captured(launch),
        DIE_WITH_PARENT_ENV: "1",
    }
    if launch.part is not None:
        env["VLLM_HOST_IP"] = launch.host
    if launch.columns.nucleus:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # nuclei are captured from the first one
    if launch.strict_parity:
        env[FP32_RESIDUAL_ENV] = "1"
    if launch.device == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(launch.cpu_kv_cache_gib)
        env["OMP_NUM_THREADS"] = str(launch.cpu_threads)
        env["TORCH_COMPILE_DISABLE"] = "1"  # a few helpers of the sampler would otherwise be compiled, with g++
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if launch.num_workers == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM's condition for running without a worker process
    return env
