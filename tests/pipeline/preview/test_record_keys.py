"""Keys that flags name and no record has are told, in a dry run and at a start."""

import json
from pathlib import Path

import pytest

from pipeline.preview.record_keys import absent_keys
from pipeline.prompt_source import build_prompt_source
from tests.pipeline.preview.planned import settings_of, write_job
from vime.cli.main import main

MEDIA = ["--multimodal-keys", '{"image": "pictures"}']


def warned(folder: Path, *flags: str, record: dict[str, object] | None = None) -> list[str]:
    settings = settings_of(folder, *flags)
    if record is not None:
        lines = [{"input": "a", "label": "b"}, {"input": "c", "label": "d", **record}]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return absent_keys(settings, build_prompt_source(settings))


@pytest.mark.parametrize(
    ("flags", "record"),
    [
        (["--metadata-key", "metta"], {"metta": {"level": 3}}),
        (["--tool-key", "toolz"], {"toolz": [{"name": "search"}]}),
        (MEDIA, {"pictures": ["a.png"]}),
    ],
)
def test_a_key_that_no_record_has_is_told(tmp_path: Path, flags: list[str], record: dict[str, object]) -> None:
    (words,) = warned(tmp_path, *flags)
    assert words.startswith(flags[0])
    assert next(iter(record)) in words
    assert "none of the first 3 records has it" in words
    assert warned(tmp_path, *flags, record=record) == [], "one record is enough"


def test_keys_that_nobody_named_may_be_absent(tmp_path: Path) -> None:
    assert warned(tmp_path) == []


def test_a_dry_run_tells_of_keys_and_of_flags_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--metadata-key", "metta", "--custom-rm-path", "tests.end_to_end.rewards.digits", "--num-epoch", "2"]
    assert main(["train", "--dry-run", *write_job(tmp_path), "--assume-gpus", "8", *flags]) == 0
    said = capsys.readouterr().out
    assert "--metadata-key metta: none of the first" in said
    assert "--rm-type f1 has no effect with --custom-rm-path" in said
    assert "--num-epoch 2 has no effect with --num-rollout 20" in said
