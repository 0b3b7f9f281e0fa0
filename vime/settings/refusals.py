"""Documented settings that the code can't honour yet. They are refused, never accepted and ignored.

A row leaves this table in the change that builds what it needs.
"""

from __future__ import annotations

from vime.settings.groups import Settings
from vime.settings.machine import has_gpus
from vime.settings.refusal import Refusal
from vime.settings.rules.quantities import option, own_engines, size


def refused(settings: Settings) -> list[str]:
    """One sentence for each setting that can't be honoured: flag, value, what is allowed, and why."""
    return [
        f"{row.flag}{value and ' ' + value} is not built yet, allowed: {row.accepted}. {row.reason}"
        for row in REFUSALS
        if (value := row.found(settings)) is not None
    ]


def _above_one(settings: Settings, flag: str) -> str | None:
    found = size(settings.vllm_args, flag)
    return str(found) if found > 1 else None


def _unserved_groups(settings: Settings) -> str | None:
    """Path of the file, with what of it is refused."""
    path, engines = settings.engine.vllm_config, own_engines(settings)
    if path is None or not engines:
        return None
    kinds = sorted({spec.kind for spec in engines} & {"prefill", "decode"})
    return f"{path} (with groups of worker_type {' and '.join(kinds)})" if kinds else None


def _trained_media(settings: Settings) -> object:
    sends_text = settings.rollout.custom_generate_function_path is not None
    return None if sends_text or settings.debug.debug_rollout_only else settings.data.multimodal_keys


def _gloo_between_gpus(settings: Settings) -> str | None:
    return "gloo" if settings.trainer.distributed_backend == "gloo" and has_gpus() else None


def _profile_for_nsight(settings: Settings) -> str | None:
    words = settings.megatron_args
    return "" if option(words, "--profile") is not None and option(words, "--use-pytorch-profiler") is None else None


REFUSALS: tuple[Refusal, ...] = (
    # Placement
    Refusal(
        "--vllm-data-parallel-size",
        "1",
        "Replicas inside one engine agree on a pause only every few steps, and tell of one replica's weights alone; "
        "engines of their own are replicas that don't.",
        "two GPUs, to try publications into replicas under load",
        refused_value=lambda settings: _above_one(settings, "--vllm-data-parallel-size"),
    ),
    # Engines and router
    Refusal(
        "--vllm-config",
        "regular and placeholder groups",
        "Prefill engines hand keys and values over by NIXL, which no vLLM that vime is tested with is installed with.",
        "two GPUs and the package nixl",
        refused_value=_unserved_groups,
    ),
    Refusal(
        "--prefill-num-servers",
        "left out, or 0",
        "Prefill engines hand keys and values over by NIXL, which no vLLM that vime is tested with is installed with.",
        "two GPUs and the package nixl",
        refused_value=lambda settings: settings.engine.prefill_num_servers or None,
    ),
    # Prompts
    Refusal(
        "--multimodal-keys",
        "left out, or with --custom-generate-function-path or --debug-rollout-only",
        "Engines are sent media, but the models that vime trains read text.",
        "a vision-language model in Megatron, and a GPU to train it on",
        refused_value=_trained_media,
    ),
    # Trainer and checkpoints
    Refusal(
        "--distributed-backend",
        "nccl, or gloo on machines without GPUs",
        "Ranks on GPUs exchange tensors that gloo can't reduce where they are.",
        "two NVIDIA GPUs, to try gloo between them",
        refused_value=_gloo_between_gpus,
    ),
    # Evaluation, debugging, logging
    Refusal(
        "--profile",
        "with --use-pytorch-profiler",
        "Its ranges are of CUDA, for Nsight Systems, and no vime run was ever profiled with it.",
        "an NVIDIA GPU with Nsight Systems",
        refused_value=_profile_for_nsight,
    ),
)
