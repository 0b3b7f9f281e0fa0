"""One trainer rank: reads its shards by reference, trains, exports weights, saves and loads."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.candidates import CandidateNeeds
from pipeline.messages import TrainReport
from pipeline.planner import BatchPlan
from pipeline.shards import NO_CANDIDATES, RankShard, totals
from pipeline.training_log import log_step
from storage.contracts import PayloadPool
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.vllm_utils.sender import GlooSender
from vime.data.lazy import token_counts
from vime.errors import TrainerError


class TrainerWorker:
    """Rank-local; all ranks are told the same things in the same order."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        pool: PayloadPool,
        rank: int,
        training_log: Path,
        candidates: CandidateNeeds = NO_CANDIDATES,
    ) -> None:
        """Take which of the sampler's candidates the objective asks for."""
        self._trainer, self._pool, self._rank, self._training_log = trainer, pool, rank, training_log
        self._candidates = candidates
        self._replica = trainer.data_parallel_rank
        self._sender: GlooSender | None = None

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
            self._trainer.rollout_trained(plan.rollout_id)
            read_s = shard.waited_s
        return TrainReport(metrics, train_s=time.monotonic() - started - read_s, read_s=read_s, tokens=tokens)

    def open_sender(self, address: str, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        """Listen for the engines (rank 0 only); returns what each engine needs to join, one worker an engine."""
        self._close_sender()
        world_size = 1 + len(engine_names)
        self._sender = GlooSender(address, 0, world_size, engine_names=engine_names, timeout_s=timeout_s)
        return [self._sender.init_info(rank_offset) for rank_offset in range(1, world_size)]

    def connect_sender(self) -> None:
        """Wait until the engines have joined (rank 0 only)."""
        self._opened_sender().connect()

    def send_weights(self) -> int:
        """Send the current weights to the engines; bytes sent.

        Every rank calls it, because the gathering of sharded weights is collective; rank 0 sends.
        """
        weights = self._trainer.named_hf_weights()
        if self._rank == 0:
            return self._opened_sender().send(weights).num_bytes
        for _ in weights:
            pass
        return 0

    def save(self, directory: Path, rollout_id: int) -> None:
        self._trainer.save(directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> None:
        self._trainer.load(directory, rollout_id)

    def load_start(self) -> None:
        self._trainer.load_start()

    def close(self) -> None:
        self._close_sender()
        self._trainer.close()
        self._pool.close()

    def _opened_sender(self) -> GlooSender:
        if self._sender is None:
            raise TrainerError(f"rank {self._rank}: no engine is connected.", next_step="Call open_sender first.")
        return self._sender

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
