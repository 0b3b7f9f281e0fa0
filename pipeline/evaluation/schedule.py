"""When a run evaluates, and whether it has done so already. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation.records import EvaluationRecord
from recovery.branch import Branch
from recovery.commit import CommitParent
from vime.settings.groups import Settings


@dataclass(frozen=True)
class EvaluationSchedule:
    """Steps are counted in rollout batches that have been trained."""

    interval: int | None
    """None: never, but in a run that only evaluates."""
    num_rollout: int
    before_training: bool
    rollouts_per_epoch: int | None = None
    """None where the run's length is not given in epochs."""

    @classmethod
    def of(cls, settings: Settings, *, has_data: bool) -> EvaluationSchedule:
        evaluation, num_rollout = settings.evaluation, settings.data.num_rollout or 0
        return cls(
            evaluation.eval_interval if has_data else None,
            num_rollout,
            before_training=not evaluation.skip_eval_before_train,
            rollouts_per_epoch=settings.data.rollouts_per_epoch,
        )

    @property
    def evaluates_only(self) -> bool:
        return self.num_rollout == 0

    def is_due(self, step: int) -> bool:
        """Before training, after every `interval` batches, at the end of an epoch, and after the last batch.

        Always where nothing is trained.
        """
        if self.evaluates_only:
            return True
        if self.interval is None:
            return False
        if step == 0:
            return self.before_training
        ends_epoch = self.rollouts_per_epoch is not None and step % self.rollouts_per_epoch == 0
        return step % self.interval == 0 or ends_epoch or step == self.num_rollout


def is_evaluated(
    step: int, parent: CommitParent | None, records: Sequence[EvaluationRecord], branches: Sequence[Branch]
) -> bool:
    """Whether the weights that a session begins with, `step` batches trained, have a result already.

    It is from the branch that made the commit `parent` (None: the weights of before training), or from a session that
    began with the same weights.
    """
    same = {branch.branch for branch in branches if branch.parent == parent}
    if parent is not None:
        same.add(parent.branch)
    return any(record.evaluation == step and record.branch in same and not record.problem for record in records)
