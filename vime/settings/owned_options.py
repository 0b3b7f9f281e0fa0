"""Options of vLLM and of its router that vime sets itself, and why or from what."""

from __future__ import annotations

from collections.abc import Mapping

OWNED_VLLM_OPTIONS: Mapping[str, str] = {
    "model": "It follows --hf-checkpoint.",
    "host": "It follows the engine's placement.",
    "port": "It follows the engine's placement.",
    "served-model-name": "It follows --hf-checkpoint.",
    "seed": "It follows --seed.",
    "tensor-parallel-size": "It follows --rollout-num-gpus-per-engine.",
    "logprobs-mode": "Training needs the log-probabilities that tokens were sampled with.",
    "enable-return-routed-experts": "It follows --use-rollout-routing-replay.",
    "return-sampling-mask": "What --rollout-top-p leaves to sample from comes through vime's own plug-in.",
    "weight-transfer-config": "Weights arrive through vime's own plug-in.",
    "worker-extension-cls": "Weights are staged through vime's own plug-in.",
    "enable-scale-out": "Generation from token ids needs it.",
    "enable-prompt-tokens-details": "Cache reuse is measured with it.",
}

STRICT_PARITY_OPTIONS = ("async-scheduling", "enable-prefix-caching", "hf-overrides")
"""Options of vLLM that `--backend-parity strict` sets."""

OWNED_ROUTER_OPTIONS: Mapping[str, str] = {
    "host": "It follows the router's placement; for a router of your own give --vllm-router-ip.",
    "port": "It follows the router's placement; for a router of your own give --vllm-router-port.",
    "worker-urls": "Engines register when they are ready.",
    "prefill": "Engines register when they are ready.",
    "decode": "Engines register when they are ready.",
    "vllm-pd-disaggregation": "It follows --prefill-num-servers and --vllm-config.",
}


def option_name(word: str) -> str:
    """`--no-enable_prefix_caching=1` -> `enable-prefix-caching`; `--speculative-config.method` -> its first part."""
    return word.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("no-")
