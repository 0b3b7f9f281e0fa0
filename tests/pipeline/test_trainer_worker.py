"""A rank trains every step of a plan from the pool, and says what it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.wide_groups import lease_bytes
from pipeline.candidates import CandidateNeeds
from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from pipeline.trainer_worker import TrainerWorker
from storage.columns import encode_group
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.summary import summarize
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import LazyMicrobatches, PreparedMicrobatches
from vime.utils.types import Sample

SETTINGS = PlanSettings(
    rollout_batch_size=4,
    rollouts_per_step=4,
    packing=PackingSettings(num_ranks=2, max_tokens=40),
    normalize_rewards=True,
    normalize_std=False,
)


class ReadingTrainer:
    """Prepares a batch before its steps, then reads each microbatch once, in order, as the real one does."""

    data_parallel_rank = 1

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.tokens = 0
        self.prepared: list[int] = []
        self.candidates: list[int] = []
        self.finished: list[tuple[int, int]] = []

    def prepare(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> Sequence[Sequence[PackedMicrobatch]]:
        self.prepared.append(len(steps))
        return [
            PreparedMicrobatches(step, [{"old_log_probs": -batch.sampler_log_probs} for batch in step])
            for step in steps
        ]

    def train_step(self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals) -> dict[str, float]:
        assert isinstance(microbatches, LazyMicrobatches)
        assert totals.num_rollouts == 4
        found = list(microbatches)
        assert all((batch.old_log_probs == -batch.sampler_log_probs).all() for batch in found)
        self.candidates += [batch.top_k.ids.shape[1] for batch in found if batch.top_k is not None]
        self.trained.append([int(index) for batch in found if batch.advantages.any() for index in batch.sample_indices])
        self.tokens += sum(batch.num_tokens for batch in found)
        assert [batch.num_tokens for batch in found] == list(microbatches.token_counts)
        return {"loss": float(len(self.trained))}

    def rollout_trained(self, rollout_id: int) -> None:
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
            version_spans=[(0, 0, 5)],
            reward=float(member),
            status=Sample.Status.COMPLETED,
        )
        for member in range(2)
    ]


def test_a_rank_prepares_a_batch_once_and_trains_its_share_of_every_step(tmp_path: Path) -> None:
    groups = [samples(number) for number in range(4)]
    trainer = ReadingTrainer()
    with Pool.create(tmp_path / "pool", "run") as pool:
        items = [(encode_group(group), lease_bytes(number)) for number, group in enumerate(groups)]
        refs = pool.publish_groups(items, submission_id="groups")
        accepted = [
            AcceptedGroup(number, number, ref, summarize(group))
            for number, (ref, group) in enumerate(zip(refs, groups, strict=True))
        ]
        plan = plan_batch(accepted, SETTINGS, branch="b", rollout_id=0, policy_version=1)
        worker = TrainerWorker(
            cast(MegatronTrainer, cast(Any, trainer)), pool, 1, tmp_path / "rank_1.jsonl", CandidateNeeds(2)
        )
        report = worker.train(plan)
    shares = [
        [plan.samples[number].sample_index for numbers in step.ranks[1] for number in numbers] for step in plan.steps
    ]
    assert trainer.trained == shares
    assert len(shares) == 2
    assert trainer.prepared == [2]
    assert trainer.finished == [(0, 2)], "after the last step, and once"
    assert set(trainer.candidates) == {2}
    assert (report.metrics, report.tokens) == ({"loss": 2.0}, trainer.tokens)
    assert report.read_s >= 0
    logged = [json.loads(line) for line in (tmp_path / "rank_1.jsonl").read_text().splitlines()]
    assert len(logged) == 2
