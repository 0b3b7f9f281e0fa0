"""The prompt source that the settings describe."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside, with_num_rollout
from vime.errors import BadRecordError, DataError, ModelError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings
from vime.settings.resolve import Resolved, resolve
from vime.utils.types import Sample

GOOD = b'{"input": "a"}\n'


def settings_for(path: Path, *words: str) -> Settings:
    return parse_settings(["--prompt-data", str(path), *words])


def test_a_bad_line_stops_by_default_and_names_the_flag_that_skips_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD * 2 + b'{"input": "a",}\n' + GOOD * 3)
    with pytest.raises(BadRecordError, match=rf"{path}:3:15: bad JSON") as caught:
        build_prompt_source(settings_for(path))
    assert "--bad-prompt-records skip" in caught.value.next_step


def test_skipped_lines_are_counted_and_written_aside(tmp_path: Path) -> None:
    path, aside = tmp_path / "p.jsonl", tmp_path / "bad_prompts.jsonl"
    path.write_bytes(GOOD * 2 + b'{"input": "a",}\n' + GOOD * 3)
    source = build_prompt_source(settings_for(path, "--bad-prompt-records", "skip"))
    (told,) = set_bad_prompts_aside(source, aside)
    assert told.startswith(
        f"1 of 6 prompt records are bad and were skipped; they are in {aside}. The first: {path}:3:15"
    )
    assert [json.loads(line)["where"] for line in aside.read_text().splitlines()] == [f"{path}:3:15"]


def test_without_bad_lines_nothing_is_written_or_told(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    source = build_prompt_source(settings_for(path, "--bad-prompt-records", "skip"))
    assert set_bad_prompts_aside(source, tmp_path / "aside.jsonl") == []
    assert not (tmp_path / "aside.jsonl").exists()


def test_more_bad_lines_than_the_failed_fraction_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD * 3 + b"x\n")
    with pytest.raises(BadRecordError, match=r"1 of 4 records are bad, allowed: a fraction of 0.2"):
        build_prompt_source(settings_for(path, "--bad-prompt-records", "skip"))
    words = ("--bad-prompt-records", "skip", "--rollout-max-failed-fraction", "0.25")
    assert len(build_prompt_source(settings_for(path, *words))) == 3


def resolved_for(path: Path, *words: str) -> Resolved:
    return resolve(["--prompt-data", str(path), "--rollout-batch-size", "2", *words])


def test_epochs_become_rollouts_and_the_record_says_why(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD * 5)
    resolved = resolved_for(path, "--num-epoch", "3")
    derived = with_num_rollout(resolved, build_prompt_source(resolved.settings))
    assert (derived.settings.data.num_rollout, derived.settings.data.rollouts_per_epoch) == (6, 2)
    assert str(derived.sources["--num-rollout"]) == "derived:--num-epoch"


def test_a_given_number_of_rollouts_wins_over_epochs(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    resolved = resolved_for(path, "--num-epoch", "3", "--num-rollout", "4")
    data = with_num_rollout(resolved, build_prompt_source(resolved.settings)).settings.data
    assert (data.num_rollout, data.num_epoch, data.rollouts_per_epoch) == (4, None, None)


def test_an_epoch_that_fills_no_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    resolved = resolved_for(path, "--num-epoch", "3")
    with pytest.raises(DataError, match="1 prompts fill none of --rollout-batch-size 2"):
        with_num_rollout(resolved, build_prompt_source(resolved.settings))


class OwnSource:
    """Three prompts that say which settings they came with."""

    def __init__(self, args: Any) -> None:
        self._place, self._args = 0, args

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self._place += num_samples
        return [[Sample(prompt=f"seed {self._args.rollout_seed}")] for _ in range(num_samples)]

    def add_samples(self, groups: list[list[Sample]]) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...

    def __len__(self) -> int:
        return 3


def test_a_data_source_of_ones_own_is_made_with_the_settings(tmp_path: Path) -> None:
    words = ["--data-source-path", f"{__name__}.OwnSource", "--rollout-seed", "7", "--save", str(tmp_path)]
    source = build_prompt_source(parse_settings(words))
    assert len(source) == 3
    assert source.take(source.cursor_at(4), 1)[0][0].prompt == "seed 7"


def test_a_data_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data-source-path no\.such\.Source: ModuleNotFoundError"):
        build_prompt_source(parse_settings(["--data-source-path", "no.such.Source", "--save", str(tmp_path)]))


@pytest.mark.parametrize(
    "words", [("--rollout-max-prompt-len", "4"), ("--rollout-max-context-len", "5")], ids=["limit", "context"]
)
def test_prompts_are_counted_in_tokens_and_long_ones_are_told_about(
    tmp_path: Path, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = tmp_path / "p.jsonl", tmp_path / "bad_prompts.jsonl"
    path.write_bytes(b'{"input": "one two three four"}\n{"input": "one two three four five"}\n')
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Words())
    source = build_prompt_source(settings_for(path, *words))
    assert len(source) == 1
    (told,) = set_bad_prompts_aside(source, aside)
    assert told.startswith(f"1 of 2 prompt records are too long and were skipped; they are in {aside}. The first: ")
    assert told.endswith(f"{path}:2: the prompt has 5 tokens, allowed: 4.")
    assert "prompt_too_long" in aside.read_text()


def test_a_missing_tokenizer_is_told_where_prompts_have_to_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    words = ("--rollout-max-prompt-len", "4", "--hf-checkpoint", str(tmp_path))
    with pytest.raises(ModelError, match=f"--hf-checkpoint {tmp_path}: its tokenizer can't be loaded"):
        build_prompt_source(settings_for(path, *words))


class Words:
    """One token a word."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return list(range(len(text.split())))
