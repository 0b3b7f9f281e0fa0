"""The sample: what a rollout produces and training consumes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.utils.append_tokens import append_tokens
from vime.utils.equality import same_value


@dataclass(eq=False)
class Sample:
    """One generated sequence and everything that is known about it.

    T is the number of tokens, R is `response_length`; lists and arrays are per response token unless said otherwise.
    Attributes that are not named here may be set; they are kept with the sample, as long as they can be stored.
    """

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"
        """A recoverable error; there may be a part of the response."""

    @dataclass
    class SpecInfo:
        """Speculative decoding: sums over the requests of one sample."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        @property
        def accept_rate(self) -> float:
            """Accepted / drafted tokens; 0 when nothing was drafted."""
            return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

        @property
        def accept_length(self) -> float:
            """Sampled tokens, divided by the steps that verified drafts; 0 without one."""
            return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    @dataclass
    class PrefixCacheInfo:
        """The engine's prefix cache: sums over the requests of one sample."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Cached / prompt tokens; 0 without a prompt."""
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    group_index: int | None = None
    """Number of the prompt group, unique in a run."""
    index: int | None = None
    """Number of the sample, unique in a run."""
    rollout_id: int | None = None
    """Execution that made the sample; segments of one execution share it. Falls back to `index`."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """[T] prompt and response token ids."""
    multimodal_inputs: dict[str, Any] | None = None
    """Media of the prompt as given: images, arrays."""
    multimodal_train_inputs: dict[str, Any] | None = None
    """Media as the model takes them: arrays or tensors."""
    multimodal_train_input_id: Any = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """Number of tokens after the first prompt."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """[R] zeros and ones; None means all ones."""
    weight_versions: list[str] = field(default_factory=list)
    """Policy versions that made tokens of this sample, one entry per finished generate call."""
    version_spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(policy version, start, stop) over response positions; sorted, without overlap, covering the sampled tokens."""
    rollout_log_probs: list[float] | None = None
    """[R] natural-log probability of each token under the policy that sampled it; 0.0 for tokens not sampled."""
    rollout_topk_token_ids: npt.NDArray[np.int32] | None = None
    """[R, k] the sampler's k most probable tokens, most probable first."""
    rollout_topk_log_probs: npt.NDArray[np.float32] | None = None
    """[R, k] their natural-log probabilities over the whole vocabulary."""
    rollout_top_p_token_ids: npt.NDArray[np.int32] | None = None
    """[N] tokens that top-p left to sample from, position after position."""
    rollout_top_p_token_offsets: npt.NDArray[np.int32] | None = None
    """[R + 1] position r has entries offsets[r]:offsets[r + 1] of the ids, none when it was not sampled."""
    rollout_top_p_log_probs: npt.NDArray[np.float32] | None = None
    """[N] natural-log probabilities, normalised over each position's tokens."""
    rollout_routed_experts: npt.NDArray[Any] | list[npt.NDArray[Any]] | None = None
    """[T - 1, L, K] ids of the K experts that each of L MoE layers chose for each token but the last one, of any
    integer type; or consecutive chunks of its rows."""
    teacher_log_probs: list[float] | None = None
    """[R] natural-log probability of each token under the teacher."""
    remove_sample: bool = False
    """Don't train it: its mask counts as zeros. Its reward still takes part in normalisation."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds spent outside the engine, for example in the reward."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that the loss mask counts."""
        return self.response_length if self.loss_mask is None else int(sum(self.loss_mask))

    def min_version(self) -> int | None:
        """Oldest policy version among the sampled tokens, None when nothing was sampled."""
        return min((version for version, _, _ in self.version_spans), default=None)

    def max_version(self) -> int | None:
        """Newest policy version among the sampled tokens, None when nothing was sampled."""
        return max((version for version, _, _ in self.version_spans), default=None)

    def mask_array(self) -> npt.NDArray[np.uint8]:
        """What is trained of the response, as uint8 [R]: the loss mask, or zeros for a removed sample."""
        if self.remove_sample:
            return np.zeros(self.response_length, np.uint8)
        if self.loss_mask is None:
            return np.ones(self.response_length, np.uint8)
        return np.asarray(self.loss_mask, np.uint8)

    def append_response_tokens(
        self,
        args: Any,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens that an engine made, or (`trainable=False`) that a tool or an environment put there.

        `args` are the settings as hooks get them. `meta_info` is what the engine said besides the tokens; its keys
        are listed in `vime.utils.append_tokens`. `update_terminal_info` takes `status` from its finish reason.

        Raises:
            SampleError: lengths that don't agree, or something missing that earlier tokens have. The sample is then
                as it was.
        """
        append_tokens(self, args, list(tokens), log_probs, trainable, meta_info or {}, text, update_terminal_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, those not named in the class too; the status as text, the counters as dicts."""
        return {
            **vars(self),
            "status": self.status.value,
            "spec_info": vars(self.spec_info).copy(),
            "prefix_cache_info": vars(self.prefix_cache_info).copy(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Inverse of `to_dict`; what is missing gets its default.

        Raises:
            ValueError: an unknown status.
            TypeError: an unknown counter.
        """
        known = dict(values)
        if "status" in known:
            known["status"] = cls.Status(known["status"])
        for name, kind in (("spec_info", cls.SpecInfo), ("prefix_cache_info", cls.PrefixCacheInfo)):
            if name in known:
                known[name] = kind(**known[name])
        others = {name: known.pop(name) for name in values if name not in _FIELDS}
        sample = cls(**known)
        vars(sample).update(others)
        return sample

    def __eq__(self, other: object) -> bool:
        """Same attributes with same values, arrays element by element."""
        return isinstance(other, Sample) and same_value(self.to_dict(), other.to_dict())


_FIELDS = frozenset(field.name for field in dataclasses.fields(Sample))
