"""One trainer rank: reads its shards by reference, trains, saves and loads."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.candidates import CandidateNeeds
from pipeline.messages import TrainReport
from pipeline.planner import BatchPlan
from pipeline.shards import NO_CANDIDATES, RankShard, totals
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
        candidates: CandidateNeeds = NO_CANDIDATES,
    ) -> None:
        """`weights` is this rank's part in publications; `candidates` says what to read of the sampler's candidates."""
        self._trainer, self._pool, self._training_log = trainer, pool, training_log
        self._candidates = candidates
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
        with RankShard(self._pool, plan, self._replica, candidates=self._candidates) as shard:
            steps = self._trainer.prepare([shard.step(number) for number in range(len(plan.steps))])
            for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
                tokens += sum(token_counts(microbatches))
                metrics = self._trainer.train_step(microbatches, totals(step))
                log_step(self._training_log, plan, number, self._replica)
            read_s = shard.waited_s
        return TrainReport(metrics, train_s=time.monotonic() - started - read_s, read_s=read_s, tokens=tokens)

    def save(self, directory: Path, rollout_id: int) -> None:
        self._trainer.save(directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> None:
        self._trainer.load(directory, rollout_id)

    def load_hf(self) -> None:
        self._trainer.load_hf()

    def close(self) -> None:
        self.weights.close()
        self._trainer.close()
        self._pool.close()
