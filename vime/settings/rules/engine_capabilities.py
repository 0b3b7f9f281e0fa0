"""What the installed engine can't do: a table of facts, and the rules that read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vime.models.families import family_of
from vime.settings.groups import Settings
from vime.settings.machine import Machine
from vime.settings.rules.json_files import model_config
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import option, size


@dataclass(frozen=True)
class EngineFacts:
    """What vLLM does from `since` on. The fields about routed experts are what it asks for to return them."""

    since: tuple[int, int]
    has_version_spans: bool
    routes_need_prefix_cache: bool
    routes_need_one_stage: bool
    routes_exclude: tuple[str, ...]
    """KV connectors."""


FACTS = (
    EngineFacts((0, 26), False, False, False, ()),
    EngineFacts((0, 32), True, True, True, ("Nixl", "MoRIIO", "Mooncake")),
)
"""Measured versions, oldest first; a version between two has the facts of the older one."""


CPU_LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Entries of `config.json`."""


def facts_of(version: str) -> EngineFacts:
    """Facts of a version such as "0.32.0+cpu"; those of the oldest measured one for anything older or unreadable."""
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    known = [facts for facts in FACTS if facts.since <= number]
    return known[-1] if known else FACTS[0]


def kept_requests_need_version_spans(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """Without spans, tokens before and after an update can't be told apart. vime's plug-in adds them to its own
    engines; those that someone else started have only what vLLM has."""
    version = machine.vllm_version
    if version is None or facts_of(version).has_version_spans or settings.weights.flush_cache_interval == 1:
        return
    if settings.engine.rollout_external_engine_addrs is not None:
        yield problem(
            settings,
            "--flush-cache-interval --rollout-external-engine-addrs",
            allowed=f"--flush-cache-interval 1 with engines of others and vLLM {version}",
            reason="This vLLM doesn't say which tokens came from which weights (0.32 does).",
            next_step="Leave out --flush-cache-interval, or start the engines with vLLM 0.32.",
        )


def latent_attention_on_a_cpu_has_its_sizes(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """vLLM's kernel of latent attention for CPUs is compiled for DeepSeek's own sizes, and fails at the first token."""
    config = model_config(settings)
    if family_of(config) != "deepseek_v3" or not (machine.vllm_version or "").endswith("+cpu"):
        return
    for key, allowed in CPU_LATENT_SIZES.items():
        if config.get(key) != allowed and not settings.objective.is_supervised:
            yield problem(
                settings,
                "--hf-checkpoint",
                found=f"{settings.checkpoint.hf_checkpoint}/config.json: {key} is {config.get(key)}",
                allowed=f"{allowed} on a CPU",
                reason="vLLM's latent attention on a CPU has this size only; other sizes need a GPU.",
                next_step="Run it on a GPU, or choose a model with that size.",
            )


def routes_need_a_prefix_cache(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """vLLM 0.32 keeps routes beside the blocks of its prefix cache."""
    if not _returns_routes(settings, machine) or not _facts(machine).routes_need_prefix_cache:
        return
    if option(settings.vllm_args, "--vllm-no-enable-prefix-caching") is not None:
        yield problem(
            settings,
            "--use-rollout-routing-replay",
            found="--use-rollout-routing-replay with --vllm-no-enable-prefix-caching",
            allowed="prefix caching on",
            reason=f"vLLM {machine.vllm_version} returns routed experts only with prefix caching.",
            next_step="Leave out --vllm-no-enable-prefix-caching; --prefix-cache-salt version keeps versions apart.",
        )


def routes_need_one_stage(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """vLLM 0.32 collects routes on one pipeline stage and one context rank."""
    if not _returns_routes(settings, machine) or not _facts(machine).routes_need_one_stage:
        return
    for name in ("pipeline-parallel-size", "prefill-context-parallel-size", "decode-context-parallel-size"):
        value = size(settings.vllm_args, f"--vllm-{name}")
        if value > 1:
            yield problem(
                settings,
                "--use-rollout-routing-replay",
                found=f"--use-rollout-routing-replay with --vllm-{name} {value}",
                allowed="1",
                reason=f"vLLM {machine.vllm_version} returns routed experts only without pipeline and context "
                "parallelism.",
                next_step=f"Leave out --vllm-{name}; tensor and data parallelism work.",
            )


def routes_exclude_connectors(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """A prefill engine's routes don't travel with its KV."""
    excluded = _facts(machine).routes_exclude if _returns_routes(settings, machine) else ()
    if not excluded:
        return
    prefill = settings.engine.prefill_num_servers
    connector = option(settings.vllm_args, "--vllm-kv-transfer-config")
    given = {
        "--prefill-num-servers": str(prefill) if prefill else None,
        "--vllm-kv-transfer-config": connector if any(name in (connector or "") for name in excluded) else None,
    }
    for flag, value in given.items():
        if value is not None:
            yield problem(
                settings,
                "--use-rollout-routing-replay",
                found=f"--use-rollout-routing-replay with {flag} {value}",
                allowed="one of them",
                reason=f"vLLM {machine.vllm_version} doesn't hand routed experts from prefill to decode engines.",
                next_step=f"Leave out {flag}.",
            )


def _returns_routes(settings: Settings, machine: Machine) -> bool:
    return settings.objective.use_rollout_routing_replay and machine.vllm_version is not None


def _facts(machine: Machine) -> EngineFacts:
    return facts_of(machine.vllm_version or "")


MACHINE_RULES = (
    kept_requests_need_version_spans,
    latent_attention_on_a_cpu_has_its_sizes,
    routes_need_a_prefix_cache,
    routes_need_one_stage,
    routes_exclude_connectors,
)
