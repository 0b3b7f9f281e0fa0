"""The stream without engines and Ray: real pool, queue, coordinator, planner and commit; synthetic samples.

Run as a script it trains until it is done, or kills itself at a named point:
`python mini_stream.py RUN POINT OCCURRENCE SEGMENT_GROUPS [gc|memory]`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.coordinator import TAKE_OVER_S, Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import AcceptRequest, encode
from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from pipeline.token_log import write_token_log
from pipeline.training_log import log_step
from pipeline.transports.memory import open_memory_coordinator
from recovery.branch import Branch, append_branch
from recovery.commit import CommitParent, commit_path, iteration_directory, read_commit, read_queue_state, write_commit
from recovery.restore import RestoreMode, plan_restore
from recovery.retention import releasable
from recovery.run_on_disk import scan_run
from storage import segment_list
from storage.columns import EncodedGroup, encode_group
from storage.contracts import PayloadPool
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from storage.prompt_codec import decode_prompt
from storage.refs import GroupRef
from storage.summary import summarize
from tests.support.shared_mount import create_pool, root_at_peer
from vime.data.cursor import PromptTask
from vime.data.prompt_stream import PromptStream
from vime.data.prompts import PromptSource
from vime.data.trained_tokens import TrainedTokens
from vime.utils.types import Sample

BATCH, MEMBERS, ROLLOUTS, SAVE_EVERY = 4, 2, 6, 2
KEPT_COMMITS = 2
PACK_BYTES = 4096
POINTS = ("publish", "accept", "plan", "train", "training_completed", "save", "commit", "rotate", "rotated", "done")
PLAN = PlanSettings(
    rollout_batch_size=BATCH,
    rollouts_per_step=BATCH * MEMBERS,
    packing=PackingSettings(num_ranks=1, max_tokens=64),
    normalize_rewards=True,
    normalize_std=True,
)
TWO_RANKS = replace(PLAN, packing=PackingSettings(num_ranks=2, max_tokens=64))
TRAINED = TrainedTokens(np.array([-0.75, -0.125], np.float32), np.array([0.5, -1.5], np.float32), 0.1875)
"""Of every sample: the sampler's log-probabilities are -0.5 and -0.25."""


def write_prompts(run: Path) -> Path:
    path = run / "prompts.jsonl"
    run.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"input": "p{number}"}}\n' for number in range(30)))
    return path


def synthetic_group(prompt: PromptTask, version: int) -> list[Sample]:
    """Finished samples with one prompt token and two response tokens each."""
    return [
        Sample(
            group_index=prompt.group_index,
            index=prompt.first_sample_index + member,
            prompt=prompt.prompt,
            tokens=[1, 2, 3],
            response="ab",
            response_length=2,
            reward=float(member),
            rollout_log_probs=[-0.5, -0.25],
            version_spans=[(version, 0, 2)],
            status=Sample.Status.COMPLETED,
        )
        for member in range(MEMBERS)
    ]


class MiniStream:
    """One session on a run folder."""

    def __init__(
        self,
        run: Path,
        reach: Callable[[str], None] = lambda _: None,
        ckpt_step: int | None = None,
        *,
        rollouts: int = ROLLOUTS,
        online_gc: bool = False,
        in_memory: bool = False,
    ) -> None:
        self._run, self._reach, self._rollouts, self._online_gc = run, reach, rollouts, online_gc
        self._in_memory = in_memory
        self._parts: PartTable[bytes] = PartTable()
        self._pool_root = run / "rollout_data" / "pool"
        self.branch = uuid.uuid4().hex[:8]
        self.plan = plan_restore(
            scan_run(run, self._pool_root), load=None, save=str(run), ckpt_step=ckpt_step, num_rollout=rollouts,
            new_branch=self.branch,
        )  # fmt: skip
        parent, trained, next_group_index, memory = None, [], 0, None
        if self.plan.commit_rollout is not None and self.plan.commit_directory is not None:
            directory = run / self.plan.commit_directory
            record = read_commit(commit_path(directory, self.plan.commit_rollout))
            parent = CommitParent(record.branch, self.plan.commit_rollout)
            state = read_queue_state(directory, self.plan.commit_rollout)
            trained, next_group_index, memory = state.trained, state.next_group_index, state.memory
        self._parent = parent
        self._config = CoordinatorConfig(
            self.branch, trained, rollouts * BATCH, 2 * BATCH, lease_seconds=60, online_gc=online_gc,
            next_group_index=next_group_index, memory=memory,
        )  # fmt: skip
        self.coordinator = self._open_coordinator()
        self._pool: PayloadPool = (
            MemoryPool("rollout", self._parts)
            if self._in_memory
            else Pool.open(root_at_peer(self._pool_root) or self._pool_root, segment_bytes=PACK_BYTES)
        )
        append_branch(run, Branch(self.branch, parent, self.plan.directory, 0))

    def restart_coordinator(self) -> None:
        """As Ray does it when the process dies: the same settings again."""
        self.coordinator.close()
        self.coordinator = self._open_coordinator()

    @property
    def num_kept(self) -> int:
        """Publications that the pool in memory holds."""
        return len(self._parts)

    def source(self) -> PromptStream:
        """Where prompts come from."""
        return PromptSource(write_prompts(self._run), n_samples_per_prompt=MEMBERS)

    def _open_coordinator(self) -> Coordinator:
        source = self.source()
        if self._in_memory:
            return open_memory_coordinator(
                run_id="rollout",
                parts=self._parts,
                step_log_folder=self._run / "rollout" / "step_log",
                source=source,
                config=self._config,
            )
        return open_coordinator(
            open_pool=self._open_pool,
            source=source,
            owner="test",
            config=self._config,
            clock=itertools.count(0.0, TAKE_OVER_S).__next__,  # its producer takes nothing over
        )

    def _open_pool(self) -> Pool:
        if (self._pool_root / "vime" / "pool.json").exists():
            return Pool.open(self._pool_root, segment_bytes=PACK_BYTES)
        return create_pool(self._pool_root, "rollout", segment_bytes=PACK_BYTES)

    async def produce(self) -> None:
        """Generate and have accepted as many groups as the queue wants."""
        while work := self.coordinator.lease("producer", 3).work:
            groups = [synthetic_group(decode_prompt(self._pool.read_blob(item.prompt_ref)), 1) for item in work]
            self._reach("publish")
            items = [(encode_group(group), item.lease) for group, item in zip(groups, work, strict=True)]
            refs = self._publish(items)
            self._reach("accept")
            await self.coordinator.accept(
                [
                    AcceptRequest(item.lease, ref, summarize(group))
                    for item, ref, group in zip(work, refs, groups, strict=True)
                ]
            )

    def _publish(self, items: list[tuple[EncodedGroup, bytes]]) -> list[GroupRef]:
        return self._pool.publish_groups(items, submission_id=uuid.uuid4().hex)

    async def run(self) -> None:
        """Train what is left, committing every second rollout."""
        if self.plan.mode is RestoreMode.COMPLETE:
            return
        for rollout_id in range(self.plan.start_rollout, self._rollouts):
            await self.produce()
            groups = await self.coordinator.wait_for_groups(BATCH, 5)
            assert groups is not None
            plan = plan_batch(groups, PLAN, branch=self.branch, rollout_id=rollout_id, policy_version=1)
            self._reach("plan")
            self.coordinator.record_plan(plan.batch_id, plan.positions, encode(plan))
            self._reach("train")
            write_token_log(self._run / "token_log", 0, plan, {s.sample_index: TRAINED for s in plan.samples})
            log_step(self._run / "training_log" / "rank_0.jsonl", plan, 0, 0)
            self._reach("training_completed")
            self.coordinator.training_completed(rollout_id, 1, plan.positions)
            if rollout_id % SAVE_EVERY == SAVE_EVERY - 1:
                self._commit(rollout_id)
        self._reach("done")

    def _commit(self, rollout_id: int) -> None:
        self._reach("save")
        directory = self._run / self.plan.directory
        checkpoint = iteration_directory(directory, rollout_id)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "model").write_bytes(b"weights")
        self._reach("commit")
        self.coordinator.save_prompt_source(rollout_id)
        state = self.coordinator.queue_state()
        write_commit(
            directory, rollout_id=rollout_id, branch=self.branch, parent=self._parent, weight_version=1,
            run_id="rollout", rollout_data_dir="", queue_state=state,
        )  # fmt: skip
        self._reach("rotate")
        self.coordinator.rotate(state, releasable(self._run, self.plan.directory, KEPT_COMMITS))
        self._reach("rotated")

    def close(self) -> None:
        self._pool.close()
        self.coordinator.close()


def run_session(
    run: Path,
    reach: Callable[[str], None] = lambda _: None,
    ckpt_step: int | None = None,
    kind: type[MiniStream] = MiniStream,
    **options: Any,
) -> MiniStream:
    """One whole session; the stream is closed when this returns."""
    (run / "training_log").mkdir(parents=True, exist_ok=True)
    stream = kind(run, reach, ckpt_step, **options)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
    return stream


def _kill_at(wanted: str, occurrence: int) -> Callable[[str], None]:
    seen = 0

    def reach(point: str) -> None:
        nonlocal seen
        seen += point == wanted
        if point == wanted and seen == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


if __name__ == "__main__":
    segment_list.MAX_SEGMENT_GROUPS = int(sys.argv[4])
    if "two_ranks" in sys.argv[5:]:
        PLAN = TWO_RANKS
    options = {"online_gc": "gc" in sys.argv[5:], "in_memory": "memory" in sys.argv[5:]}
    run_session(Path(sys.argv[1]), _kill_at(sys.argv[2], int(sys.argv[3])), **options)
