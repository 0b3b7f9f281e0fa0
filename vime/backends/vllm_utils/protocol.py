"""What goes to an engine and what comes back, independent of the engine's version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]

START_VERSION = 0
"""Version of the weights that an engine was started with, before any publication."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. `top_k` -1 means all; `seed` None means unseeded; stop strings are looked for in the text."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt of token ids. `request_id` must be unique among the running requests of an engine.

    Requests with different `cache_salt` never share cached keys and values.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    cache_salt: str | None = None


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `[start, stop)` were sampled from weights of `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True)
class GenerateResult:
    """R sampled tokens. `log_probs[i]` is the finite natural-log probability under the processed distribution.

    `version_spans` cover `[0, R)` in order. `num_cached_tokens` counts prompt tokens served from the prefix cache.
    `routed_experts` is `[P + R - 1, L, K]` when the engine was started to return routes.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]
    num_prompt_tokens: int
    num_cached_tokens: int
    routed_experts: npt.NDArray[np.integer] | None = None
    sampling_mask: list[list[int]] | None = None


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do, found out by asking it."""

    engine_version: str
    model: str
    max_model_len: int
    world_size: int
    token_in_generate: bool
    pause_keep: bool
    version_spans: bool
    cache_salt: bool
    routed_experts: bool
    sampling_mask: bool
    weight_transfer: bool


@dataclass(frozen=True)
class EngineMetrics:
    """Queue lengths of an engine, and the fraction of its cache in use."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float = field(default=0.0)
