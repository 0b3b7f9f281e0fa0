"""Jobs without a queue end, too, when their ranks don't get on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.job_supervision import supervise_ranks
from pipeline.messages import encode
from pipeline.process_watch import ProcessWatch
from pipeline.stages import Stage
from pipeline.stall_chain import RankActivity
from vime.errors import StalledError
from vime.settings.groups import QueueSettings


class Workers:
    """One rank that works on a call, takes steps while it is told to, and nothing besides."""

    queue = SimpleNamespace(actor=None)
    producers = SimpleNamespace(actors=[])

    def __init__(self, folder: Path) -> None:
        self.watch = ProcessWatch(lambda name: folder / name)
        self.num_steps, self.gets_on = 0, True
        self.trainers = SimpleNamespace(ranks=[SimpleNamespace(activity=SimpleNamespace(remote=self._activity))])

    async def _activity(self) -> bytes:
        self.num_steps += self.gets_on
        return encode(RankActivity("trains", 1.0, self.num_steps))


async def test_a_job_whose_ranks_take_no_step_for_too_long_says_so_and_ends(tmp_path: Path) -> None:
    workers, notes = Workers(tmp_path), list[str]()
    patience = dataclasses.replace(QueueSettings(), stall_after=0.05, stall_timeout=0.3)
    stages = supervise_ranks(patience, workers, notes.append, tmp_path / "stalls.jsonl")  # type: ignore[arg-type]
    stages.begin(Stage("trains", 3))
    never = asyncio.Event()
    try:
        async with asyncio.timeout(30):
            working = asyncio.create_task(workers.watch.guarded(never.wait()))
            while workers.num_steps < 20:
                await asyncio.sleep(0.01)
            assert not working.done(), "steps are progress, however long a rollout takes"
            workers.gets_on = False
            with pytest.raises(StalledError, match=r"--stall-timeout is 0\.3: step 3 trains <- .*rank 0.* trains"):
                await working
    finally:
        await workers.watch.close()
    assert notes
    assert all(note.startswith("No progress for 0 s: step 3 trains") for note in notes)
    assert "step 3 trains" in json.loads((tmp_path / "stalls.jsonl").read_text().splitlines()[0])["words"]
