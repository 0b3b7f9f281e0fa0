"""A rank trains every step of a plan from the pool, and says what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.wide_groups import lease_bytes
from pipeline.candidates import CandidateNeeds
from pipeline.optional_records import Unwritten
from pipeline.packing import PackingSettings
from pipeline.planner import BatchPlan, PlanSettings, plan_batch
from pipeline.shard_needs import ShardNeeds
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.trainer_worker import TrainerWorker
from storage.columns import encode_group
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.summary import summarize
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import LazyMicrobatches, PreparedMicrobatches
from vime.data.trained_tokens import TrainedTokens
from vime.errors import DiskFullError
from vime.utils.types import Sample

SETTINGS = PlanSettings(
    rollout_batch_size=4,
    rollouts_per_step=4,
    packing=PackingSettings(num_ranks=2, max_tokens=40),
    normalize_rewards=True,
    normalize_std=False,
)


def given(values: np.ndarray | None) -> list[float]:
    return [] if values is None else values.tolist()


MASKED = (3, 4)
"""Samples without routes and teacher."""


class ReadingTrainer:
    """Prepares a batch before its steps, then reads each microbatch once, in order, as the real one does."""

    data_parallel_rank = 1
    sample_losses = {0: 0.5}  # noqa: RUF012
    trained_tokens: dict[int, TrainedTokens]

    def __init__(self, worked: list[str] | None = None) -> None:
        self._worked = [] if worked is None else worked
        self.trained: list[list[int]] = []
        self.tokens = 0
        self.prepared: list[int] = []
        self.candidates: list[int] = []
        self.teachers: list[float] = []
        self.routes: list[Any] = []
        self.finished: list[tuple[int, int]] = []
        self.values: list[list[float]] = []

    def rest(self) -> int:
        self._worked.append("rest")
        return 0

    def save(self, directory: Path, iteration: int, *, background: object) -> None:
        assert background is None
        self._worked.append(f"actor save {directory} {iteration}")

    def prepare(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> Sequence[Sequence[PackedMicrobatch]]:
        self._worked.append("actor prepare")
        self.prepared.append(len(steps))
        self.values += [batch.values.tolist() for step in steps for batch in step if batch.values is not None]
        return [
            PreparedMicrobatches(step, [{"old_log_probs": -batch.sampler_log_probs} for batch in step])
            for step in steps
        ]

    def train_step(
        self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals, place: StepPlace
    ) -> dict[str, float]:
        assert isinstance(microbatches, LazyMicrobatches)
        assert totals.num_rollouts == 4
        assert place == StepPlace(0, len(self.trained))
        self._worked.append("actor step")
        found = list(microbatches)
        assert all((batch.old_log_probs == -batch.sampler_log_probs).all() for batch in found)
        self.teachers += [value for batch in found for value in given(batch.teacher_log_probs)]
        self.routes += [batch.routes.ids.tolist() for batch in found if batch.routes is not None]
        self.candidates += [batch.top_k.ids.shape[1] for batch in found if batch.top_k is not None]
        self.trained.append([int(index) for batch in found if batch.advantages.any() for index in batch.sample_indices])
        self.trained_tokens = {index: TrainedTokens(np.zeros(5), np.zeros(5), 0.0) for index in self.trained[-1]}
        self.tokens += sum(batch.num_tokens for batch in found)
        assert [batch.num_tokens for batch in found] == list(microbatches.token_counts)
        return {"loss": float(len(self.trained))}

    @property
    def layout(self) -> dict[str, str | int]:
        return {}

    def parameter_digests(self) -> dict[str, str]:
        return {}

    def rollout_trained(self, rollout_id: int) -> None:
        self._worked.append("actor finish")
        self.finished.append((rollout_id, len(self.trained)))


def samples(group: int) -> list[Sample]:
    return [
        Sample(
            group_index=group,
            index=2 * group + member,
            tokens=list(range(10 + group + member)),
            response_length=5,
            rollout_log_probs=[-0.5] * 5,
            rollout_topk_token_ids=[[1, 2]] * 5,
            rollout_topk_log_probs=[[-0.5, -1.5]] * 5,
            rollout_routed_experts=None if is_masked else np.full((9 + group + member, 2, 2), [[0, 1], [2, 3]]),
            teacher_log_probs=None if is_masked else [-0.25] * 5,
            loss_mask=[int(not is_masked)] * 5,
            version_spans=[(0, 0, 5)],
            reward=float(member),
            status=Sample.Status.COMPLETED,
        )
        for member in range(2)
        for is_masked in [2 * group + member in MASKED]
    ]


class CountingCritic:
    """Values are token counts; it learns without candidates."""

    def __init__(self, worked: list[str]) -> None:
        self._worked = worked

    def finish_batch(self) -> None:
        self._worked.append("critic finish")

    def save(self, directory: Path, iteration: int, *, background: object) -> None:
        assert background is None
        self._worked.append(f"critic save {directory} {iteration}")

    def with_values(self, steps: Sequence[LazyMicrobatches]) -> list[PreparedMicrobatches]:
        self._worked.append("critic values")
        return [PreparedMicrobatches(step, [{"values": 0 * b.sampler_log_probs + b.num_tokens} for b in step])
                for step in steps]  # fmt: skip

    def with_returns(self, steps: Sequence[PreparedMicrobatches]) -> list[PreparedMicrobatches]:
        self._worked.append("critic returns")
        return [
            PreparedMicrobatches(step.without_candidates(), [{"token_returns": -b.values} for b in step])
            for step in steps
        ]

    def train_step(self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals) -> dict[str, float]:
        assert totals.num_rollouts == 4
        self._worked.append("critic step")
        for batch in microbatches:
            assert batch.top_k is None
            assert (batch.token_returns == -batch.num_tokens).all()
        return {"value_loss": 3.0}


@contextmanager
def planned(folder: Path) -> Iterator[tuple[Pool, BatchPlan]]:
    """A pool with four groups, and a plan of two steps for two ranks."""
    groups = [samples(number) for number in range(4)]
    with Pool.create(folder / "pool", "run") as pool:
        items = [(encode_group(group), lease_bytes(number)) for number, group in enumerate(groups)]
        refs = pool.publish_groups(items, submission_id="groups")
        accepted = [
            AcceptedGroup(number, number, ref, summarize(group))
            for number, (ref, group) in enumerate(zip(refs, groups, strict=True))
        ]
        yield pool, plan_batch(accepted, SETTINGS, branch="b", rollout_id=0, policy_version=1)


def as_trainer(trainer: ReadingTrainer) -> MegatronTrainer:
    return cast(MegatronTrainer, cast(Any, trainer))


def weights_of(trainer: ReadingTrainer) -> TrainerWeights:
    return TrainerWeights(as_trainer(trainer), 1, PublishSettings())


def test_a_function_on_the_rollout_data_comes_after_preparation_and_before_the_first_step(tmp_path: Path) -> None:
    worked: list[str] = []
    trainer = ReadingTrainer(worked)

    def postprocess(steps: Any, rollout_id: int) -> Any:
        worked.append(f"postprocess {rollout_id}")
        return steps

    with planned(tmp_path) as (pool, plan):
        TrainerWorker(
            as_trainer(trainer), pool, tmp_path / "log.jsonl", weights_of(trainer), postprocess=postprocess
        ).train(plan)
    assert worked[:3] == ["actor prepare", "postprocess 0", "actor step"]


def test_a_rank_prepares_a_batch_once_and_trains_its_share_of_every_step(tmp_path: Path) -> None:
    trainer = ReadingTrainer()
    needs = ShardNeeds(CandidateNeeds(2), RoutePart((1,), (1,), 2), teacher=True)
    with planned(tmp_path) as (pool, plan):
        worker = TrainerWorker(as_trainer(trainer), pool, tmp_path / "rank_1.jsonl", weights_of(trainer), needs)
        report = worker.train(plan)
    shares = [
        [plan.samples[number].sample_index for numbers in step.ranks[1] for number in numbers] for step in plan.steps
    ]
    assert trainer.trained == shares
    assert len(shares) == 2
    assert trainer.prepared == [2]
    assert trainer.finished == [(0, 2)], "after the last step, and once"
    assert set(trainer.candidates) == {2}
    assert set(trainer.teachers) == {-0.25, 0.0}
    assert {tuple(ids) for batch in trainer.routes for row in batch for ids in row} == {(2, 3)}
    mine = {plan.samples[number].sample_index for step in plan.steps for each in step.ranks[1] for number in each}
    assert report.samples_without_routes == sorted(mine & set(MASKED)) != []
    assert (report.metrics, report.tokens) == ({"loss": 2.0}, trainer.tokens)
    assert report.read_s >= 0
    logged = [json.loads(line) for line in (tmp_path / "rank_1.jsonl").read_text().splitlines()]
    assert len(logged) == 2


def test_what_a_rank_made_of_all_tokens_of_a_batch_is_told_once(tmp_path: Path) -> None:
    trainer, told = ReadingTrainer(), []
    with planned(tmp_path) as (pool, plan):
        TrainerWorker(
            as_trainer(trainer),
            pool,
            tmp_path / "log.jsonl",
            weights_of(trainer),
            tokens=lambda batch, tokens: told.append((batch.batch_id, sorted(tokens))),
        ).train(plan)
    assert told == [(plan.batch_id, sorted(index for step in trainer.trained for index in step))]


def test_a_full_disk_under_what_a_run_can_do_without_ends_no_batch(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise DiskFullError("full")

    with planned(tmp_path) as (pool, plan):
        worker = TrainerWorker(
            as_trainer(ReadingTrainer()),
            pool,
            tmp_path / "log.jsonl",
            weights_of(ReadingTrainer()),
            tokens=full,
            dump=full,
            results=full,
            memory=cast(Any, SimpleNamespace(batch_trained=full)),
        )
        report = worker.train(plan)
    assert report.metrics == {"loss": 2.0}
    lacking = ["dump of training data", "token log", "log of results", "memory record"]
    assert report.unwritten == [Unwritten(record, 1, "full") for record in lacking]


def worker_with_critic(folder: Path, pool: Pool, critic_only: int) -> tuple[TrainerWorker, ReadingTrainer, list[str]]:
    worked: list[str] = []
    trainer, critic = ReadingTrainer(worked), cast(Any, CountingCritic(worked))
    worker = TrainerWorker(
        as_trainer(trainer),
        pool,
        folder / "rank_1.jsonl",
        weights_of(trainer),
        critic=critic,
        num_critic_only_steps=critic_only,
    )
    return worker, trainer, worked


def test_the_critic_learns_first_and_the_actor_gets_the_values_from_before(tmp_path: Path) -> None:
    with planned(tmp_path) as (pool, plan):
        worker, trainer, worked = worker_with_critic(tmp_path, pool, critic_only=0)
        report = worker.train(plan)
        worker.save(tmp_path, 7)
        worker.rest()
    of_critic = ["critic values", "critic returns", "critic step", "critic step", "critic finish"]
    turns = [*of_critic, "actor prepare", "actor step", "actor step", "actor finish"]
    saves = [f"actor save {tmp_path} 7", f"critic save {tmp_path} 7"]
    assert worked == [*turns, *saves, "rest"]
    assert report.metrics == {"value_loss": 3.0, "loss": 2.0}
    assert [value for values in trainer.values for value in values]
    assert report.tokens == trainer.tokens
    assert len((tmp_path / "rank_1.jsonl").read_text().splitlines()) == 2


def test_the_first_batches_train_the_critic_alone(tmp_path: Path) -> None:
    with planned(tmp_path) as (pool, plan):
        worker, trainer, worked = worker_with_critic(tmp_path, pool, critic_only=1)
        report = worker.train(plan)
    assert worked == ["critic values", "critic returns", "critic step", "critic step", "critic finish"]
    assert (trainer.trained, report.metrics) == ([], {"value_loss": 3.0})
    assert len((tmp_path / "rank_1.jsonl").read_text().splitlines()) == 2, "the samples count as trained"
