"""The sample: what a rollout produces and training consumes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError


@dataclass
class Sample:
    """One generated sequence and everything that is known about it.

    Array fields are per response token unless said otherwise; R is `response_length`.
    """

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    """Number of the prompt group, unique in a run."""
    index: int | None = None
    """Number of the sample, unique in a run."""
    rollout_id: int | None = None
    """Execution that made the sample; segments of one execution share it. Falls back to `index`."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response token ids."""
    response: str = ""
    response_length: int = 0
    """Number of tokens after the first prompt."""
    label: Any = None
    reward: float | dict[str, float] | None = None
    loss_mask: list[int] | None = None
    """[R] zeros and ones; None means all ones."""
    rollout_log_probs: list[float] | None = None
    """[R] natural-log probability of each token under the policy that sampled it; 0.0 for tokens not sampled."""
    weight_versions: list[str] = field(default_factory=list)
    """Policy versions that made tokens of this sample, one entry per finished generate call."""
    version_spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(policy version, start, stop) over response positions; sorted, without overlap, covering the sampled tokens."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    non_generation_time: float = 0.0

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that count in the loss."""
        return self.response_length if self.loss_mask is None else int(sum(self.loss_mask))

    def min_version(self) -> int | None:
        """Oldest policy version among the sampled tokens, None when nothing was sampled."""
        return min((version for version, _, _ in self.version_spans), default=None)

    def max_version(self) -> int | None:
        """Newest policy version among the sampled tokens, None when nothing was sampled."""
        return max((version for version, _, _ in self.version_spans), default=None)

    def mask_array(self) -> npt.NDArray[np.uint8]:
        """Loss mask as uint8 [R]."""
        if self.loss_mask is None:
            return np.ones(self.response_length, np.uint8)
        return np.asarray(self.loss_mask, np.uint8)

    def check_trainable(self) -> None:
        """Raise `SampleError` unless the sample can be trained on.

        Checks: finished status, at least one prompt and one response token, mask and log-probabilities of
        length R, log-probabilities finite and not above zero, spans that cover the response in order.
        """
        where = f"sample {self.index} of group {self.group_index}"
        if self.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            raise SampleError(f"{where}: status is {self.status.value}, allowed: completed, truncated.")
        if not 0 < self.response_length < len(self.tokens):
            raise SampleError(
                f"{where}: response_length is {self.response_length} of {len(self.tokens)} tokens; "
                "allowed: at least one prompt token and one response token."
            )
        if self.loss_mask is not None and len(self.loss_mask) != self.response_length:
            raise SampleError(f"{where}: loss_mask has {len(self.loss_mask)} entries, allowed: {self.response_length}.")
        if self.rollout_log_probs is None or len(self.rollout_log_probs) != self.response_length:
            found = "none" if self.rollout_log_probs is None else str(len(self.rollout_log_probs))
            raise SampleError(f"{where}: {found} rollout_log_probs, allowed: {self.response_length}.")
        log_probs = np.asarray(self.rollout_log_probs, np.float64)
        bad = np.flatnonzero(~(np.isfinite(log_probs) & (log_probs <= 0.0)))
        if bad.size:
            raise SampleError(
                f"{where}: rollout_log_probs[{int(bad[0])}] is {self.rollout_log_probs[int(bad[0])]}, "
                "allowed: finite and not above zero."
            )
        position = 0
        for version, start, stop in self.version_spans:
            if version < 0 or start != position or stop <= start:
                raise SampleError(
                    f"{where}: version span ({version}, {start}, {stop}) does not continue at {position}."
                )
            position = stop
        if position != self.response_length:
            raise SampleError(f"{where}: version spans cover {position} of {self.response_length} response tokens.")
