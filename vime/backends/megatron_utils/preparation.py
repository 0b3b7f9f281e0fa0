"""What a rollout batch needs beyond the plan, before its first step: scores of several models, then advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.ragged import Reduce
from vime.backends.megatron_utils.advantages import with_token_advantages
from vime.backends.megatron_utils.frozen_models import FrozenModels
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import PreparedMicrobatches, without_candidates

Steps = Sequence[Sequence[PackedMicrobatch]]


class Score(Protocol):
    """One pass without gradients under the weights that the model has now; collective."""

    def __call__(
        self,
        microbatches: Sequence[PackedMicrobatch],
        *,
        replay_nucleus: bool = True,
        replay_routes: bool = True,
        with_entropy: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities and, where asked for, entropies: [1 or 2, R] of each microbatch."""


def prepared_steps(
    steps: Steps, objective: ObjectiveConfig, frozen: FrozenModels, score: Score, sum_over_replicas: Reduce
) -> Steps:
    """The microbatches of each step with all that `objective` needs of them.

    In this order: the reference's log-probabilities over the whole vocabulary, the teacher's and the actor's among
    the recorded nucleus, advantages. Frozen models choose experts for themselves.
    """
    prepared = steps
    if frozen.reference is not None:
        with frozen.reference.in_place():
            prepared = [_of_reference(step, score) for step in prepared]
    if frozen.teacher is not None:
        with frozen.teacher.in_place():
            prepared = [_of_teacher(step, score) for step in prepared]
    if objective.recomputes_old_log_probs(len(steps)):
        prepared = [_of_actor(step, score, with_entropy=objective.scores_entropy) for step in prepared]
    if objective.has_token_advantages:
        prepared = with_token_advantages(prepared, objective, sum_over_replicas)
    return prepared


def _of_reference(step: Sequence[PackedMicrobatch], score: Score) -> PreparedMicrobatches:
    rows = score(without_candidates(step), replay_nucleus=False, replay_routes=False)
    return PreparedMicrobatches(step, [{"reference_log_probs": log_probs} for (log_probs,) in rows])


def _of_teacher(step: Sequence[PackedMicrobatch], score: Score) -> PreparedMicrobatches:
    rows = score(step, replay_routes=False)
    return PreparedMicrobatches(step, [{"teacher_log_probs": log_probs} for (log_probs,) in rows])


def _of_actor(step: Sequence[PackedMicrobatch], score: Score, *, with_entropy: bool) -> PreparedMicrobatches:
    names = ("old_log_probs", "old_entropies") if with_entropy else ("old_log_probs",)
    rows = score(step, with_entropy=with_entropy)
    return PreparedMicrobatches(step, [dict(zip(names, values, strict=True)) for values in rows])
