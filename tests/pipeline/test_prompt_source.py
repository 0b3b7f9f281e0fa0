"""The prompt source that the settings describe."""

import json
from pathlib import Path

import pytest

from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside
from vime.errors import BadRecordError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings

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
    told = set_bad_prompts_aside(source, aside)
    assert told is not None
    assert told.startswith(
        f"1 of 6 prompt records are bad and were skipped; they are in {aside}. The first: {path}:3:15"
    )
    assert [json.loads(line)["where"] for line in aside.read_text().splitlines()] == [f"{path}:3:15"]


def test_without_bad_lines_nothing_is_written_or_told(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    source = build_prompt_source(settings_for(path, "--bad-prompt-records", "skip"))
    assert set_bad_prompts_aside(source, tmp_path / "aside.jsonl") is None
    assert not (tmp_path / "aside.jsonl").exists()


def test_more_bad_lines_than_the_failed_fraction_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD * 3 + b"x\n")
    with pytest.raises(BadRecordError, match=r"1 of 4 records are bad, allowed: a fraction of 0.2"):
        build_prompt_source(settings_for(path, "--bad-prompt-records", "skip"))
    words = ("--bad-prompt-records", "skip", "--rollout-max-failed-fraction", "0.25")
    assert len(build_prompt_source(settings_for(path, *words))) == 3
