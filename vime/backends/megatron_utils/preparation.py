"""What a rollout batch needs beyond the plan, before its first step: scores of several models, then advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.ragged import Reduce
from vime.backends.megatron_utils.advantages import with_token_advantages
from vime.backends.megatron_utils.frozen_models import FrozenModels
from vime.data.batch import PackedMicrobatch, RouteRows
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


class RecordedScore(Protocol):
    """As `Score`; also the experts that the routers chose, of each microbatch this rank's own part. Collective."""

    def __call__(
        self, microbatches: Sequence[PackedMicrobatch], *, with_entropy: bool = False
    ) -> tuple[list[npt.NDArray[np.float32]], list[RouteRows]]: ...


def prepared_steps(
    steps: Steps,
    objective: ObjectiveConfig,
    frozen: FrozenModels,
    score: Score,
    sum_over_replicas: Reduce,
    *,
    before: Callable[[str], None],
    record: RecordedScore | None = None,
) -> Steps:
    """The microbatches of each step with all that `objective` needs of them.

    `record` is there where training replays the actor's own experts; it is then always called.

    In this order: the reference's log-probabilities over the whole vocabulary, the teacher's and the actor's among
    the recorded nucleus, advantages. Frozen models choose experts for themselves. `before` is told of each of these
    passes, by the prefix of the documented hook.
    """
    prepared = steps
    if frozen.reference is not None:
        with frozen.reference.in_place():
            before("ref_")
            prepared = [_of_reference(step, score) for step in prepared]
    if frozen.teacher is not None:
        with frozen.teacher.in_place():
            before("teacher_")
            prepared = [_of_teacher(step, score) for step in prepared]
    recomputes, with_entropy = objective.recomputes_old_log_probs(len(steps)), objective.scores_entropy
    if record is not None:
        before("")
        prepared = [_with_own_routes(step, record, keeps=recomputes, with_entropy=with_entropy) for step in prepared]
    elif recomputes:
        before("")
        prepared = [_of_actor(step, score, with_entropy=with_entropy) for step in prepared]
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
    return PreparedMicrobatches(step, [_old(rows) for rows in score(step, with_entropy=with_entropy)])


def _with_own_routes(
    step: Sequence[PackedMicrobatch], record: RecordedScore, *, keeps: bool, with_entropy: bool
) -> PreparedMicrobatches:
    """With routes, and where the objective `keeps` them with the scores of the pass that recorded them."""
    scores, routes = record(step, with_entropy=keeps and with_entropy)
    found = zip(scores, routes, strict=True)
    return PreparedMicrobatches(step, [{"routes": chosen, **(_old(rows) if keeps else {})} for rows, chosen in found])


def _old(rows: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Of one microbatch, [1 or 2, R] by field."""
    return dict(zip(("old_log_probs", "old_entropies"), rows, strict=False))
