"""One trainer rank: reads its shards by reference, trains, exports weights, saves and loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.candidates import CandidateNeeds
from pipeline.messages import TrainReport
from pipeline.planner import BatchPlan
from pipeline.shards import NO_CANDIDATES, RankShard, totals
from pipeline.training_log import log_step
from storage.contracts import PayloadPool
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.backends.vllm_utils.sender import GlooSender
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import token_counts
from vime.errors import TrainerError

if TYPE_CHECKING:
    from vime.backends.megatron_utils.critic import Critic

Steps = Sequence[Sequence[PackedMicrobatch]]


class TrainerWorker:
    """Rank-local; all ranks are told the same things in the same order."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        pool: PayloadPool,
        rank: int,
        training_log: Path,
        candidates: CandidateNeeds = NO_CANDIDATES,
        *,
        critic: Critic | None = None,
        num_critic_only_steps: int = 0,
    ) -> None:
        """Take which of the sampler's candidates the objective asks for.

        The first `num_critic_only_steps` rollout batches train the critic alone.
        """
        self._trainer, self._pool, self._rank, self._training_log = trainer, pool, rank, training_log
        self._candidates = candidates
        self._critic, self._num_critic_only_steps = critic, num_critic_only_steps
        self._replica = trainer.data_parallel_rank
        self._sender: GlooSender | None = None

    @property
    def data_parallel_size(self) -> int:
        return self._trainer.data_parallel_size

    def train(self, plan: BatchPlan) -> TrainReport:
        """Train one rollout batch, all its optimizer steps: the critic's first, then the actor's.

        The metrics are those of the last step of each.
        """
        started = time.monotonic()
        metrics: dict[str, float] = {}
        with RankShard(self._pool, plan, self._replica, candidates=self._candidates) as shard:
            steps: Steps = [shard.step(number) for number in range(len(plan.steps))]
            trains_actor = plan.rollout_id >= self._num_critic_only_steps
            if self._critic is not None:
                steps = self._critic.with_values(steps)
                learned = self._critic.with_returns(steps)
                metrics |= self._train_critic(self._critic, plan, learned, log=not trains_actor)
            if trains_actor:
                prepared = self._trainer.prepare(steps)
                metrics |= self._train_actor(plan, prepared)
            read_s = shard.waited_s
        tokens = sum(sum(token_counts(step)) for step in steps)
        return TrainReport(metrics, train_s=time.monotonic() - started - read_s, read_s=read_s, tokens=tokens)

    def rest(self) -> None:
        """Leave the device's memory to others until there is work again."""
        self._trainer.rest()

    def _train_actor(self, plan: BatchPlan, steps: Steps) -> dict[str, float]:
        """Metrics of the last step."""
        metrics: dict[str, float] = {}
        for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
            metrics = self._trainer.train_step(microbatches, totals(step), StepPlace(plan.rollout_id, number))
            log_step(self._training_log, plan, number, self._replica)
        self._trainer.finish_batch()
        return metrics

    def _train_critic(self, critic: Critic, plan: BatchPlan, steps: Steps, *, log: bool) -> dict[str, float]:
        """Metrics of the last step; with `log` the samples count as trained."""
        metrics: dict[str, float] = {}
        for number, (step, microbatches) in enumerate(zip(plan.steps, steps, strict=True)):
            metrics = critic.train_step(microbatches, totals(step))
            if log:
                log_step(self._training_log, plan, number, self._replica)
        critic.finish_batch()
        return metrics

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
        if self._critic is not None:
            self._critic.save(directory, rollout_id)

    def load(self, directory: Path, rollout_id: int) -> None:
        self._trainer.load(directory, rollout_id)
        if self._critic is not None:
            self._critic.load(directory, rollout_id)

    def load_hf(self) -> None:
        """First weights of a run."""
        self._trainer.load_hf()
        if self._critic is not None:
            self._critic.start()

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
