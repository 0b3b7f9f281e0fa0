"""A stopped run with something of everything that can be looked into: drops, letters, a resume, pending and leased."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.claim import claim_queue
from storage import segment_list
from storage.columns import encode_group
from storage.dead_letters import DeadLetterBox, letters_folder
from storage.pool import Pool
from storage.prompt_codec import decode_prompt
from tests.pipeline.mini_stream import MiniStream, synthetic_group
from vime.errors import RewardError


class Stopped(Exception):
    """The session ends here, as by a kill between two steps."""


def make_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Group 0 fails and is dropped; the first session trains 3 rollouts and commits 2, the second resumes from there,
    trains 1 and ends with groups pending and 2 leased. Segments hold 8 groups."""
    monkeypatch.setattr(segment_list, "MAX_SEGMENT_GROUPS", 8)
    for folder in ("training_log", "rollout"):
        (run / folder).mkdir(parents=True)
    _write_settings(run)
    claim_queue(run, run / "rollout_data" / "pool", has_commits=False)
    first = MiniStream(run, _stop_before_plan(4))
    _fail_first_group(run, first)
    _run(first)
    second = MiniStream(run, _stop_before_plan(2))
    second.coordinator._queue.lease("producer-1", 2)
    _run(second)
    return run


def copy_run(run: Path, target: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(run, target)
    _write_settings(target)
    return target


def _write_settings(run: Path) -> None:
    (run / "settings.json").write_text(json.dumps({"data": {"prompt_data": str(run / "prompts.jsonl")}}))


def _run(stream: MiniStream) -> None:
    try:
        asyncio.run(stream.run())
    except Stopped:
        pass
    finally:
        stream.close()


def _stop_before_plan(occurrence: int) -> Callable[[str], None]:
    seen = 0

    def reach(point: str) -> None:
        nonlocal seen
        seen += point == "plan"
        if point == "plan" and seen == occurrence:
            raise Stopped

    return reach


def _fail_first_group(run: Path, stream: MiniStream) -> None:
    with Pool.open(run / "rollout_data" / "pool") as pool:
        (work,) = stream.coordinator.lease("producer", 1).work
        sample = synthetic_group(decode_prompt(pool.read_blob(work.prompt_ref)), 1)[1]
        sample.reward = None
        (ref,) = pool.publish_groups([(encode_group([sample]), work.lease)], submission_id="dead")
        DeadLetterBox(letters_folder(run), "producer").put(
            _raised(), reason="reward_raised", group_index=0, attempt=1, samples=[sample], prompt_ref=work.prompt_ref,
            payload_ref=ref,
        )  # fmt: skip
        stream.coordinator.drop(0, work.lease, "reward_raised")


def _raised() -> RewardError:
    try:
        try:
            raise KeyError("no such environment")
        except KeyError as cause:
            raise RewardError("sample 1 of group 0: the reward raised KeyError.") from cause
    except RewardError as error:
        return error
