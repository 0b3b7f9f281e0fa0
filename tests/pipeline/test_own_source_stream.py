"""A data source of the user's own under crashes: the n-th group is always its n-th prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.custom_source import CustomPromptSource
from recovery.audit import audit_run
from tests.pipeline import mini_stream
from tests.pipeline.mini_stream import BATCH, MEMBERS, ROLLOUTS, MiniStream, run_session, synthetic_group
from vime.data.cursor import PromptTask
from vime.utils.types import Sample


class Numbered:
    """Prompt n is `question n`, as far as it was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first, self._place = self._place, self._place + num_samples
        return [[Sample(prompt=f"question {n}") for _ in range(MEMBERS)] for n in range(first, self._place)]

    def save(self, rollout_id: int) -> None:
        (self._folder / f"numbered_{rollout_id}").write_text(str(self._place))

    def load(self, rollout_id: int | None = None) -> None:
        self._place = 0 if rollout_id is None else int((self._folder / f"numbered_{rollout_id}").read_text())

    def __len__(self) -> int:
        return 7


class OwnStream(MiniStream):
    """The stream over it."""

    def source(self) -> CustomPromptSource:
        return CustomPromptSource(
            lambda: Numbered(self._run),
            name="tests.Numbered",
            n_samples_per_prompt=MEMBERS,
            state_folder=self._run / "rollout",
        )


class Crash(Exception):
    """The end of a session at some step."""


@pytest.mark.parametrize("in_memory", [False, True], ids=["straw", "memory"])
@pytest.mark.parametrize("point", ["publish", "train", "commit", "rotated"])
def test_no_crash_makes_a_group_of_another_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, in_memory: bool
) -> None:
    seen: dict[int, Any] = {}

    def checked(prompt: PromptTask, version: int) -> list[Sample]:
        assert seen.setdefault(prompt.group_index, prompt.prompt) == prompt.prompt == f"question {prompt.group_index}"
        return synthetic_group(prompt, version)

    monkeypatch.setattr(mini_stream, "synthetic_group", checked)
    for occurrence in (1, 2):
        reached: list[str] = []

        def crash(at: str, reached: list[str] = reached, occurrence: int = occurrence) -> None:
            reached.append(at)
            if reached.count(point) == occurrence and at == point:
                raise Crash

        with pytest.raises(Crash):
            run_session(tmp_path, crash, kind=OwnStream, in_memory=in_memory)
    run_session(tmp_path, kind=OwnStream, in_memory=in_memory)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert set(range(ROLLOUTS * BATCH)) <= set(seen)
