"""One trainer rank: reads its shards by reference, trains, saves and loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.memory_record import MemoryRecord
from pipeline.messages import TrainReport
from pipeline.optional_records import OptionalRecords
from pipeline.planner import BatchPlan
from pipeline.probe_sequence import ProbeSequence, pack_probe
from pipeline.shard_needs import NO_NEEDS, ShardNeeds
from pipeline.shards import RankShard, totals
from pipeline.step_checks import StepChecks
from pipeline.step_results import RolloutResult, StepResult
from pipeline.trainer_weights import TrainerWeights
from pipeline.training_log import log_step
from storage.contracts import PayloadPool
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import token_counts
from vime.data.trained_tokens import TrainedTokens
from vime.utils.kill_points import KillPoint, reach

if TYPE_CHECKING:
    from vime.backends.megatron_utils.background_save import BackgroundSave
    from vime.backends.megatron_utils.critic import Critic
    from vime.backends.megatron_utils.trainer import MegatronTrainer

Steps = Sequence[Sequence[PackedMicrobatch]]


class TrainerWorker:
    """Rank-local; all ranks are told the same things in the same order."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        pool: PayloadPool,
        training_log: Path,
        weights: TrainerWeights,
        needs: ShardNeeds = NO_NEEDS,
        *,
        critic: Critic | None = None,
        num_critic_only_steps: int = 0,
        postprocess: Callable[[Steps, int], Steps] | None = None,
        dump: Callable[[int, Steps], None] | None = None,
        results: Callable[[RolloutResult], None] | None = None,
        tokens: Callable[[BatchPlan, Mapping[int, TrainedTokens]], None] | None = None,
        rank: int = 0,
        checks: StepChecks | None = None,
        memory: MemoryRecord | None = None,
        records: OptionalRecords | None = None,
        traced: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """`weights` is this rank's part in publications; `needs` is what the objective needs of each sample.

        `postprocess(steps, rollout_id)` changes what is trained after all else is computed.

        The first `num_critic_only_steps` rollout batches train the critic alone. `dump` is given each rollout's number
        and what the actor is about to train on, `results` what the rollout came to on `rank`, and `tokens`, on one of
        the ranks that share samples, what the actor's steps made of their tokens. `checks` look at each step's metrics,
        `memory` is told of each rollout that was trained, and all work on one is done in `traced(rollout_id)`.
        What `dump`, `results`, `tokens` and `memory` can't write is noted in `records`, which the reports tell of.
        """
        self._trainer, self._pool, self._training_log = trainer, pool, training_log
        self._needs = needs
        self._critic, self._num_critic_only_steps = critic, num_critic_only_steps
        self._replica, self._postprocess = trainer.data_parallel_rank, postprocess
        self._dump, self._results, self._tokens, self._rank = dump, results, tokens, rank
        self._checks, self._memory, self._traced = checks, memory, traced
        self._records = records or OptionalRecords()
        self._saving: BackgroundSave | None = None
        self.weights = weights
        self.num_steps = 0
        """Optimizer steps of actor and critic since the start."""

    @property
    def data_parallel_size(self) -> int:
        return self._trainer.data_parallel_size

    def train(self, plan: BatchPlan) -> TrainReport:
        """Train one rollout batch, all its optimizer steps: the critic's first, then the actor's.

        The metrics are those of the last step of each.
        """
        with self._traced(plan.rollout_id):
            report = self._train(plan)
        if self._memory is not None:
            self._records.write("memory record", self._memory.batch_trained)
        return msgspec.structs.replace(report, unwritten=self._records.unwritten)

    def _train(self, plan: BatchPlan) -> TrainReport:
        started = time.monotonic()
        actor_steps: list[StepResult] = []
        critic_steps: list[StepResult] = []
        with RankShard(self._pool, plan, self._replica, needs=self._needs) as shard:
            steps: Steps = [shard.step(number) for number in range(len(plan.steps))]
            trains_actor = plan.rollout_id >= self._num_critic_only_steps
            if self._critic is not None:
                steps = self._critic.with_values(steps)
                learned = self._critic.with_returns(steps)
                critic_steps = self._train_critic(self._critic, plan, learned, log=not trains_actor)
            if trains_actor:
                prepared = self._trainer.prepare(steps)
                if self._postprocess is not None:
                    prepared = self._postprocess(prepared, plan.rollout_id)
                if self._dump is not None:
                    self._records.write("dump of training data", partial(self._dump, plan.rollout_id, prepared))
                actor_steps = self._train_actor(plan, prepared)
            read_s, without_routes = shard.waited_s, shard.samples_without_routes
        self._log_results(plan, actor_steps, critic_steps)
        metrics = {name: value for steps_of in (critic_steps, actor_steps) for name, value in _last(steps_of).items()}
        train_s = time.monotonic() - started - read_s
        tokens = sum(sum(token_counts(step)) for step in steps)
        return TrainReport(
            metrics, train_s=train_s, read_s=read_s, tokens=tokens, samples_without_routes=without_routes
        )

    def probe(self, sequences: Sequence[ProbeSequence], *, start_weights: bool) -> dict[str, list[float]]:
        """Scores of all response tokens by field of `Readings`: the usual ones, or those under the start weights."""
        packed = [pack_probe(sequence, self._trainer.route_part) for sequence in sequences]
        if start_weights:
            return {"start_weights": self._trainer.probe_start_weights(packed).tolist()}
        return {name: values.tolist() for name, values in self._trainer.probe(packed).items()}

    def rest(self) -> None:
        """Leave the device's memory to others until there is work again."""
        self._trainer.rest()

    def _train_actor(self, plan: BatchPlan, steps: Steps) -> list[StepResult]:
        results = []
        tokens: dict[int, TrainedTokens] = {}
        for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
            reach(KillPoint.BEFORE_STEP)
            place = StepPlace(plan.rollout_id, number)
            metrics = self._trainer.train_step(microbatches, totals(step), place)
            if self._checks is not None:
                self._checks.check("actor", place, metrics)
            self.num_steps += 1
            results.append(StepResult(metrics, self._trainer.sample_losses))
            tokens |= self._trainer.trained_tokens
            log_step(self._training_log, plan, number, self._replica)
            reach(KillPoint.AFTER_STEP)
        if self._tokens is not None and tokens:
            self._records.write("token log", partial(self._tokens, plan, tokens))
        self._trainer.rollout_trained(plan.rollout_id)
        return results

    def _train_critic(self, critic: Critic, plan: BatchPlan, steps: Steps, *, log: bool) -> list[StepResult]:
        """With `log` the samples count as trained."""
        results = []
        for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
            metrics = critic.train_step(microbatches, totals(step))
            if self._checks is not None:
                self._checks.check("critic", StepPlace(plan.rollout_id, number), metrics)
            results.append(StepResult(metrics))
            self.num_steps += 1
            if log:
                log_step(self._training_log, plan, number, self._replica)
        critic.finish_batch()
        return results

    def _log_results(self, plan: BatchPlan, steps: list[StepResult], critic_steps: list[StepResult]) -> None:
        if self._results is None:
            return
        parameters = self._trainer.parameter_digests()
        if self._critic is not None:
            parameters |= {f"critic.{name}": digest for name, digest in self._critic.parameter_digests().items()}
        result = RolloutResult(
            branch=plan.branch,
            rollout_id=plan.rollout_id,
            rank=self._rank,
            layout=self._trainer.layout,
            steps=steps,
            critic_steps=critic_steps,
            parameters=parameters,
        )
        self._records.write("log of results", partial(self._results, result), tries_again=True)

    def save(self, directory: Path, rollout_id: int) -> None:
        """Write this rank's part of a checkpoint."""
        reach(KillPoint.BEFORE_SAVE)
        self._save(directory, rollout_id, None)
        reach(KillPoint.AFTER_SAVE)

    def begin_save(self, directory: Path, rollout_id: int) -> None:
        """Copy this rank's part of a checkpoint, and begin to write the copy in the background.

        The checkpoint is there after `finish_save`, which all ranks call when all have returned from `save_written`.
        """
        from vime.backends.megatron_utils.background_save import BackgroundSave  # only ranks load Megatron

        saving = BackgroundSave()
        self._save(directory, rollout_id, saving)
        self._saving = saving
        saving.start(lambda: reach(KillPoint.BEFORE_SAVE), lambda: reach(KillPoint.AFTER_SAVE))

    def save_written(self) -> None:
        """Wait until this rank's part is written; may be called on any thread."""
        if self._saving is not None:
            self._saving.wait()

    def finish_save(self) -> None:
        """Make the checkpoint whole that `begin_save` began."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _save(self, directory: Path, rollout_id: int, background: BackgroundSave | None) -> None:
        self._trainer.save(directory, rollout_id, background=background)
        if self._critic is not None:
            self._critic.save(directory, rollout_id, background=background)

    def load(self, directory: Path, rollout_id: int) -> None:
        self._trainer.load(directory, rollout_id)
        if self._critic is not None:
            self._critic.load(directory, rollout_id)

    def save_hf(self, directory: Path) -> None:
        self._trainer.save_hf(directory)

    def load_hf(self) -> None:
        """The actor's weights alone, from the Hugging Face checkpoint."""
        self._trainer.load_hf()

    def load_start(self) -> None:
        """First weights of a run."""
        self._trainer.load_start()
        if self._critic is not None:
            self._critic.start()

    def close(self) -> None:
        if self._memory is not None:
            self._records.write("memory record", self._memory.close)
        self.weights.close()
        self._trainer.close()
        self._pool.close()


def _last(steps: Sequence[StepResult]) -> dict[str, float]:
    """Metrics of the last step."""
    return steps[-1].metrics if steps else {}
