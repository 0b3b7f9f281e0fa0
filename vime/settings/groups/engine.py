"""Inference engines and how they are watched."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, at_least, host_and_port, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class EngineSettings:
    """Inference engines and how they are watched. `--vllm-*` flags that aren't listed here go to vLLM."""

    vllm_config: str | None = flag(
        None, "YAML file with models and server groups, for several models or engines of several shapes.", check=place
    )
    rollout_external_engine_addrs: tuple[str, ...] | None = flag(
        None, "Addresses (host:port) of engines that someone else started.", check=host_and_port
    )
    prefill_num_servers: int | None = flag(
        None, "Engines that only prefill, when prefill and decode are separated.", check=at_least(0)
    )
    parity_probes: int = flag(
        4, "Prompts on which each engine is compared with the trainer at the start; 0 leaves it out.", check=at_least(0)
    )
    parity_threshold: float = flag(
        0.05,
        "Mean absolute difference of trainer's and sampler's log-probabilities above which the run stops.",
        check=above(0),
    )
    backend_parity: str = flag(
        "default",
        "What engines put first: their speed, or log-probabilities like the trainer's (head in float32, on a CPU the "
        "residual stream too, no prefix caching, no asynchronous scheduling).",
        choices=("default", "strict"),
    )
    vllm_enable_deterministic_inference: bool = flag(
        False,
        "Give each request a seed, made of --rollout-seed and the number of its sample, so that a repeated generation "
        "is the same as far as the engine computes the same.",
    )
    use_fault_tolerance: bool = flag(
        False, "Check engines at intervals, and replace one that dies, stalls or fails; otherwise it ends the run."
    )
    rollout_health_check_interval: float = flag(
        600.0, "Seconds between two checks of an engine; one that fails a request is checked at once.", check=above(0)
    )
    rollout_health_check_timeout: float = flag(
        600.0, "Seconds after which an engine's check counts as failed.", check=above(0)
    )
    rollout_health_check_first_wait: float = flag(
        600.0, "Seconds between an engine's start and its first check.", check=at_least(0)
    )
    rollout_cleanup_timeout: float = flag(
        60.0, "Seconds that an engine may take to stop before it is killed.", check=above(0)
    )
