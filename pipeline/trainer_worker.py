"""One trainer rank: reads its shards by reference, trains, saves and loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.messages import TrainReport
from pipeline.parity_probe import ProbeSequence, pack_probe
from pipeline.planner import BatchPlan
from pipeline.shard_needs import NO_NEEDS, ShardNeeds
from pipeline.shards import RankShard, totals
from pipeline.trainer_weights import TrainerWeights
from pipeline.training_log import log_step
from storage.contracts import PayloadPool
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.data.lazy import token_counts


class TrainerWorker:
    """Rank-local; all ranks are told the same things in the same order."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        pool: PayloadPool,
        training_log: Path,
        weights: TrainerWeights,
        needs: ShardNeeds = NO_NEEDS,
    ) -> None:
        """`weights` is this rank's part in publications; `needs` is what the objective needs of each sample."""
        self._trainer, self._pool, self._training_log = trainer, pool, training_log
        self._needs = needs
        self._replica = trainer.data_parallel_rank
        self.weights = weights

    @property
    def data_parallel_size(self) -> int:
        return self._trainer.data_parallel_size

    def train(self, plan: BatchPlan) -> TrainReport:
        """Train one rollout batch, all its optimizer steps."""
        started = time.monotonic()
        metrics: dict[str, float] = {}
        tokens = 0
        with RankShard(self._pool, plan, self._replica, needs=self._needs) as shard:
            steps = self._trainer.prepare([shard.step(number) for number in range(len(plan.steps))])
            for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
                tokens += sum(token_counts(microbatches))
                metrics = self._trainer.train_step(microbatches, totals(step))
                log_step(self._training_log, plan, number, self._replica)
            self._trainer.rollout_trained(plan.rollout_id)
            read_s, without_routes = shard.waited_s, shard.samples_without_routes
        train_s = time.monotonic() - started - read_s
        return TrainReport(
            metrics, train_s=train_s, read_s=read_s, tokens=tokens, samples_without_routes=without_routes
        )

    def probe(self, sequences: Sequence[ProbeSequence], *, start_weights: bool) -> dict[str, list[float]]:
        """Scores of all response tokens by field of `Readings`: the usual ones, or those under the start weights."""
        packed = [pack_probe(sequence, self._trainer.route_part) for sequence in sequences]
        if start_weights:
            return {"start_weights": self._trainer.probe_start_weights(packed).tolist()}
        return {name: values.tolist() for name, values in self._trainer.probe(packed).items()}

    def save(self, directory: Path, rollout_id: int) -> None:
        self._trainer.save(directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> None:
        self._trainer.load(directory, rollout_id)

    def load_start(self) -> None:
        self._trainer.load_start()

    def close(self) -> None:
        self.weights.close()
        self._trainer.close()
        self._pool.close()
