"""Tools, media and lengths of prompt records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from vime.data.cursor import PromptCursor
from vime.data.prompts import PromptLimit, PromptSource
from vime.data.records import PromptRecord
from vime.errors import BadRecordError, DataError, SampleError

TOOL = {"type": "function", "function": {"name": "add"}}
LIMIT = PromptLimit(8, lambda records: [len(record.prompt) for record in records])


def jsonl(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def only_record(path: Path, **keys: Any) -> PromptRecord:
    (task,), _ = PromptSource(path, **keys).take(PromptCursor(), 1)
    return PromptRecord(task.prompt, task.label, task.metadata, task.media)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_become_metadata_whether_list_or_text(tmp_path: Path, tools: Any) -> None:
    path = jsonl(tmp_path, {"input": "q", "tools": tools, "metadata": {"level": 1}})
    assert only_record(path, tool_key="tools").metadata == {"level": 1, "tools": [TOOL]}
    assert only_record(path).metadata == {"level": 1}


@pytest.mark.parametrize("tools", [None, [], "[]"])
def test_a_record_without_tools_has_none(tmp_path: Path, tools: Any) -> None:
    assert only_record(jsonl(tmp_path, {"input": "q", "tools": tools}), tool_key="tools").metadata == {}


@pytest.mark.parametrize("tools", ["add", "{", [1], {"a": 1}, 3])
def test_tools_of_another_kind_are_refused_with_their_place(tmp_path: Path, tools: Any) -> None:
    path = jsonl(tmp_path, {"input": "a"}, {"input": "q", "tools": tools})
    with pytest.raises(BadRecordError, match=rf"{path}:2:16: 'tools'"):
        PromptSource(path, tool_key="tools")


def test_parquet_has_tools_and_media_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    record = {"input": "q", "tools": json.dumps([TOOL]), "images": [b"\x89PNG"], "other": 1}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    found = only_record(path, tool_key="tools", media_keys={"image": "images"})
    assert found == PromptRecord("q", None, {"tools": [TOOL]}, {"image": [b"\x89PNG"]})


def test_media_are_lists_by_kind_and_a_record_may_lack_them(tmp_path: Path) -> None:
    keys = {"image": "images", "audio": "sound"}
    path = jsonl(tmp_path, {"input": "q", "images": ["a.png", "b.png"], "sound": "c.wav"})
    assert only_record(path, media_keys=keys).media == {"image": ["a.png", "b.png"], "audio": ["c.wav"]}
    assert only_record(jsonl(tmp_path, {"input": "q"}), media_keys=keys).media == {}


def test_long_prompts_are_left_out_counted_and_written_aside_without_counting_as_bad(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *({"input": text} for text in ["short", "very long prompt", "exactly8", "also too long"]))
    source = PromptSource(path, limit=LIMIT)
    assert [task.prompt for task in source.take(PromptCursor(), 4)[0]] == ["short", "exactly8", "short", "exactly8"]
    assert (len(source), len(source.long_records), source.bad_records) == (2, 2, [])
    assert source.long_records[0].message == f"{path}:2: the prompt has 16 tokens, allowed: 8."
    source.write_bad_records(tmp_path / "aside.jsonl")
    aside = [json.loads(line) for line in (tmp_path / "aside.jsonl").read_text().splitlines()]
    assert [(line["where"], line["reason"].partition(":")[0]) for line in aside] == [
        (f"{path}:2", "prompt_too_long"),
        (f"{path}:4", "prompt_too_long"),
    ]
    assert source.dataset_digest() != PromptSource(path).dataset_digest()


def test_a_prompt_that_cannot_be_rendered_is_named_by_its_place(tmp_path: Path) -> None:
    def count(records: Sequence[PromptRecord]) -> list[int]:
        if any(record.prompt == "odd" for record in records):
            raise SampleError("The chat template refuses the prompt.")
        return [1 for _ in records]

    path = jsonl(tmp_path, {"input": "even"}, {"input": "odd"}, {"input": "even"})
    with pytest.raises(BadRecordError, match=rf"{path}:2: The chat template refuses the prompt"):
        PromptSource(path, limit=PromptLimit(8, count))


def test_a_file_of_long_prompts_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every prompt is too long\. The first: .*:1: the prompt has 9 tokens"):
        PromptSource(jsonl(tmp_path, {"input": "nine char"}), limit=LIMIT)
