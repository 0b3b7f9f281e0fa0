"""What goes to an engine and what comes back, independent of the engine's version."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]
SleepMode = Literal["abort", "wait"]
EngineMemory = Literal["weights", "kv_cache"]
"""What an engine has in its device's memory besides running work."""

START_VERSION = 0
"""Version of the weights that an engine was started with, before any publication."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. `top_k` -1 means all; `seed` None means unseeded.

    Before `min_tokens` neither the end of the sequence nor a stop token is sampled. `stop` are looked for in the text,
    which has special tokens in it unless `skip_special_tokens`; tokens up to the end of the one found are returned.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class SampleColumns:
    """What is wanted of each token besides its log-probability; nothing by default, as in evaluation."""

    num_candidates: int = 0
    """Most probable tokens of each position, whether one of them was sampled or not."""
    routes: bool = False
    """Experts that were chosen for each token of prompt and response but the last."""
    nucleus: bool = False
    """Every token that top-p left to sample from, with log-probabilities normalised over them."""

    @property
    def is_empty(self) -> bool:
        return self == NO_COLUMNS


NO_COLUMNS = SampleColumns()


MediaKind = Literal["image", "audio", "video"]


@dataclass(frozen=True)
class MediaPart:
    """One medium of a prompt; `url` may hold it whole (`data:`)."""

    kind: MediaKind
    url: str


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt of token ids. `request_id` must be unique among the running requests of an engine.

    `media` are those that the placeholders of the prompt stand for, in their order; no columns come back then.
    Requests with different `cache_salt` never share cached keys and values. `routes_from` is the first row of routes
    that is wanted: a prompt that continues a sample has those before it.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    cache_salt: str | None = None
    columns: SampleColumns = NO_COLUMNS
    routes_from: int = 0
    media: tuple[MediaPart, ...] = ()


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `[start, stop)` were sampled from weights of `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True)
class Candidates:
    """The k most probable tokens of R positions, most probable first: ids int32 [R, k], and natural-log probabilities
    float32 [R, k] over the whole vocabulary."""

    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Nucleus:
    """What was left to sample from at R positions: ids int32 [N], offsets int64 [R + 1], and natural-log probabilities
    float32 [N], normalised over each position's tokens."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding of one request: tokens that were drafted, those of them that were accepted, and the steps of
    the model that verified drafts."""

    num_drafted: int
    num_accepted: int
    num_steps: int


@dataclass(frozen=True)
class GenerateResult:
    """R sampled tokens. `log_probs[i]` is the finite natural-log probability under the processed distribution.

    `version_spans` cover `[0, R)` in order. `num_cached_tokens` counts prompt tokens served from the prefix cache.
    The other columns are there when the request asked for them; `routed_experts` is `[P + R - 1 - start, L, K]`, from
    the request's `routes_from` on, in the smallest integer type that holds the number of experts.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]
    num_prompt_tokens: int
    num_cached_tokens: int
    candidates: Candidates | None = None
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    nucleus: Nucleus | None = None
    prompt_token_ids: list[int] | None = None
    """Of a request with media: the prompt as the model got it, with as many placeholders as a medium takes."""
    drafts: Drafts | None = None
    """None where the engine doesn't draft, or doesn't tell."""


@dataclass(frozen=True)
class GeneratedPiece:
    """The next n sampled tokens of a request, with what `GenerateResult` says of tokens; spans count from the first of
    the piece. The last piece of a request has a finish reason."""

    token_ids: list[int]
    log_probs: list[float]
    version_spans: list[VersionSpan]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    drafts: Drafts | None = None
    """Of the whole request, with its last piece."""


class Sampler(Protocol):
    """What answers requests for samples: an engine, or a router before several."""

    address: str

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `EngineClient.generate`."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPiece]:
        """See `EngineClient.stream`."""
        ...


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
    weight_transfer: bool
    columns: bool
    """vime's plug-in serves its sample route; without it the three fields below are zero and False."""
    max_candidates: int
    routed_experts: bool
    nucleus: bool
    sleep: bool
    """It can leave its device's memory and come back."""


@dataclass(frozen=True)
class EngineMetrics:
    """Queue lengths of an engine, and the fraction of its cache in use."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float = field(default=0.0)
