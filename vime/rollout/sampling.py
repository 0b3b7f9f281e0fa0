"""How one sample is drawn, over all requests that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vime.backends.vllm_utils.protocol import Sampling
from vime.errors import SampleError
from vime.rollout.request_seed import request_seed
from vime.utils.types import Sample

_NAMES = {
    "max_new_tokens": "max_response_tokens",
    "min_new_tokens": "min_response_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
}
"""Name in the `sampling_params` of generate functions -> field."""
_OF_THE_POLICY = ("temperature", "top_p", "top_k")
"""Trainer and sampler must agree on them, so samples of training have those of the run."""


@dataclass(frozen=True)
class SamplingSettings:
    """What holds for a whole sample; a request that continues one is asked for the rest.

    Tokens of the prompt don't count as response; prompt and response together have at most `max_context_tokens`. With
    `seed` each request gets a seed of its own, made of it and of the sample's number.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_response_tokens: int = 0
    max_context_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    seed: int | None = None

    def for_hooks(self) -> dict[str, Any]:
        """As generate functions get it."""
        values = {name: vars(self)[field] for name, field in _NAMES.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def changed(self, params: Mapping[str, Any], *, evaluation: bool) -> SamplingSettings:
        """With what a generate function, or a record's metadata, says in the names of `for_hooks`.

        Raises `SampleError` for other names, and outside of evaluation for another policy than the run's.
        """
        unknown = sorted(map(str, params.keys() - _NAMES.keys()))
        if unknown:
            raise SampleError(
                f"sampling_params has {', '.join(unknown)}, allowed: {', '.join(_NAMES)}.", reason="sampling_params"
            )
        for name in () if evaluation else _OF_THE_POLICY:
            if params.get(name, vars(self)[name]) != vars(self)[name]:
                raise SampleError(
                    f"sampling_params has {name} {params[name]!r}, allowed in training: {vars(self)[name]!r}.",
                    next_step=f"Give --rollout-{name.replace('_', '-')} for the whole run.",
                    reason="sampling_params",
                )
        changes = {_NAMES[name]: value for name, value in params.items()}
        try:
            return msgspec.convert({**vars(self), **changes}, SamplingSettings)
        except msgspec.ValidationError as error:
            raise SampleError(f"sampling_params: {error}.", reason="sampling_params") from error

    def room(self, sample: Sample) -> int:
        """How many tokens the response may still get. Raises `SampleError` for a prompt that fills the context."""
        room, most = self.max_response_tokens - sample.response_length, self.max_context_tokens
        if most is None:
            return room
        if len(sample.tokens) >= most and not sample.response_length:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index}: the prompt has {len(sample.tokens)} tokens, "
                f"allowed: {most - 1}, for a context of {most}.",
                next_step="Raise --rollout-max-context-len or leave out long prompts with --rollout-max-prompt-len.",
                reason="prompt_too_long",
            )
        return min(room, most - len(sample.tokens))

    def of_request(self, sample: Sample, max_tokens: int) -> Sampling:
        """Of the request for the next `max_tokens` of a sample."""
        return Sampling(
            max_tokens,
            self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=min(max_tokens, max(0, self.min_response_tokens - sample.response_length)),
            seed=self._seed(sample),
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _seed(self, sample: Sample) -> int | None:
        """Another one for what continues a response, which else would draw the numbers of its beginning again."""
        return None if self.seed is None else request_seed(self.seed, sample.index or 0, sample.response_length)
