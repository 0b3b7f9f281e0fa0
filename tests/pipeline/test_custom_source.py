"""A data source of the user's own: the same prompts at the same cursor, whatever the source's own place is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.custom_source import CustomPromptSource
from pipeline.group_start import anew, read_start
from pipeline.messages import Work
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.prompt_codec import encode_prompt
from storage.queue_types import Stage
from storage.summary import source_name
from vime.data.cursor import PromptCursor
from vime.errors import DataError
from vime.utils.types import Sample

SIZE, MEMBERS = 5, 2


class Counting:
    """Prompt n is `question n`; its place lies in a file for each save."""

    def __init__(self, folder: Path, *, forgets: bool = False) -> None:
        self._folder, self._forgets = folder, forgets
        self.place = 0
        self.calls: list[str] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for number in range(self.place, self.place + min(num_samples, 3)):
            first = Sample(prompt=f"question {number}", label=number % SIZE, metadata={"source_name": "own"})
            groups.append([copy.deepcopy(first) for _ in range(MEMBERS)])
        self.place += len(groups)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None: ...

    def save(self, rollout_id: int) -> None:
        if not self._forgets:
            (self._folder / f"own_{rollout_id}").write_text(json.dumps(self.place))

    def load(self, rollout_id: int | None = None) -> None:
        self.calls.append(f"load {rollout_id}")
        if rollout_id is not None and not self._forgets:
            self.place = json.loads((self._folder / f"own_{rollout_id}").read_text())

    def __len__(self) -> int:
        return SIZE


def source(folder: Path) -> CustomPromptSource:
    return CustomPromptSource(
        lambda: Counting(folder), name="own.Counting", n_samples_per_prompt=MEMBERS, state_folder=folder / "state"
    )


def prompts_at(stream: CustomPromptSource, group_index: int, n: int) -> list[Any]:
    return [task.prompt for task in stream.take(stream.cursor_at(group_index), n)[0]]


def test_groups_become_prompts_with_their_indices(tmp_path: Path) -> None:
    tasks, cursor = source(tmp_path).take(PromptCursor(), 7)
    assert [(t.group_index, t.first_sample_index, t.epoch, t.row, t.prompt, t.label) for t in tasks[4:]] == [
        (4, 8, 0, 4, "question 4", 4),
        (5, 10, 1, 0, "question 5", 0),
        (6, 12, 1, 1, "question 6", 1),
    ]
    assert tasks[0].metadata == {"source_name": "own"}
    assert cursor == PromptCursor(epoch=1, offset=2, next_group_index=7, next_sample_index=14)


def test_what_else_a_source_sets_on_its_samples_comes_with_the_prompt(tmp_path: Path) -> None:
    class Setting(Counting):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for sample in (sample for group in groups for sample in group):
                vars(sample)["source"] = "dynamic"
                sample.custom_rm_path = "own.reward"
                sample.apply_chat_template_kwargs = {"enable_thinking": False}
                sample.multimodal_inputs = {"image": ["a.png"]}
            return groups

    stream = CustomPromptSource(
        lambda: Setting(tmp_path), name="own", n_samples_per_prompt=MEMBERS, state_folder=tmp_path
    )
    (task,), _ = stream.take(PromptCursor(), 1)
    pool = MemoryPool("rollout", PartTable())
    ref = pool.publish_prompts([encode_prompt(task)], submission_id="s")[0]
    (first, _) = read_start(Work(b"", 0, ref, Stage.FRESH), pool, MEMBERS)
    assert (first.custom_rm_path, first.apply_chat_template_kwargs) == ("own.reward", {"enable_thinking": False})
    assert first.multimodal_inputs == {"image": ["a.png"]}
    assert source_name(first) == source_name(anew(first)) == "dynamic"
    assert (first.status, first.prompt, first.index) == (Sample.Status.PENDING, "question 0", 0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["take", "save", "restart"]), st.integers(0, 9)), max_size=12))
def test_no_prompt_is_skipped_or_repeated_whatever_was_saved_and_restarted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("own")
    stream, at = source(folder), 0
    for number, (step, amount) in enumerate(steps):
        if step == "take":
            assert prompts_at(stream, at, amount) == [f"question {at + n}" for n in range(amount)]
            at += amount
        elif step == "save":
            stream.save(number)
        else:
            stream, at = source(folder), max(0, at - amount)
    assert prompts_at(stream, at, 1) == [f"question {at}"]


def test_a_restart_goes_on_from_the_last_save_and_not_from_the_beginning(tmp_path: Path) -> None:
    stream = source(tmp_path)
    prompts_at(stream, 0, 6)
    stream.save(0)
    prompts_at(stream, 6, 6)
    stream.save(1)
    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting(tmp_path))
        return made[-1]

    again = CustomPromptSource(make, name="own", n_samples_per_prompt=MEMBERS, state_folder=tmp_path / "state")
    assert prompts_at(again, 8, 1) == ["question 8"]
    assert made[-1].calls == ["load 0"]


def test_a_save_that_was_cut_off_skips_no_prompt(tmp_path: Path) -> None:
    class CutOff(Counting):
        def save(self, rollout_id: int) -> None:
            super().save(rollout_id)
            raise RuntimeError("killed")

    stream = source(tmp_path)
    prompts_at(stream, 0, 4)
    stream.save(0)
    state = tmp_path / "state"
    again = CustomPromptSource(lambda: CutOff(tmp_path), name="own", n_samples_per_prompt=MEMBERS, state_folder=state)
    prompts_at(again, 0, 7)
    with pytest.raises(DataError, match="killed"):
        again.save(0)  # the same rollout, after going back to a commit before it
    assert prompts_at(source(tmp_path), 4, 1) == ["question 4"]


class Broken(Counting):
    """Answers with what it is told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__(Path())
        self._answer = answer

    def get_samples(self, num_samples: int) -> Any:  # noqa: ARG002
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "gave 0 groups at group 0"),
        ([[Sample()] * MEMBERS] * 2, "gave 2 groups at group 0"),
        (None, "gave NoneType"),
        ([Sample()], "group 0 is Sample, allowed: a list of samples"),
        ([[Sample()]], "group 0 has 1 samples, allowed: --n-samples-per-prompt 2"),
        ([[Sample(prompt="a"), Sample(prompt="b")]], "group 0 has different prompts"),
        ([[Sample(response="a"), Sample()]], "group 0 has a response, allowed: prompts"),
        (KeyError("x"), "raised KeyError: 'x'"),
    ],
)
def test_what_is_no_group_of_prompts_is_refused_by_name(tmp_path: Path, answer: Any, words: str) -> None:
    stream = CustomPromptSource(
        lambda: Broken(answer), name="own.Broken", n_samples_per_prompt=MEMBERS, state_folder=tmp_path
    )
    with pytest.raises(DataError, match=r"own\.Broken") as caught:
        stream.take(PromptCursor(), 1)
    assert words in caught.value.message


def test_a_source_without_prompts_is_refused(tmp_path: Path) -> None:
    class Empty(Counting):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="own: its length is 0, allowed: 1 or more"):
        CustomPromptSource(lambda: Empty(tmp_path), name="own", n_samples_per_prompt=1, state_folder=tmp_path)
