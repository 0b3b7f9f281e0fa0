from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.cursor import epoch_order
from vime.data.prompts import PromptCursor, PromptSource
from vime.data.record_files import record_places
from vime.errors import BadRecordError, DataError

GOOD = [{"input": f"question {i}", "label": str(i), "metadata": {"level": i}} for i in range(6)]
FROZEN_ORDER = [3, 6, 0, 4, 7, 1, 2, 5]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def write_parquet(path: Path, records: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    return path


def with_line(path: Path, line: bytes, last: bytes = b"") -> Path:
    """A file whose third line is `line`."""
    good = b'{"input": "a"}\n'
    path.write_bytes(good * 2 + line + b"\n" + good + last)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def six(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write = write_jsonl if request.param == "jsonl" else write_parquet
    return write(tmp_path / f"six.{request.param}", GOOD)


def test_prompts_come_in_file_order_with_their_indices(six: Path) -> None:
    source = PromptSource(six, label_key="label", n_samples_per_prompt=4)
    tasks, cursor = source.take(PromptCursor(), 2)
    assert [task.prompt for task in tasks] == ["question 0", "question 1"]
    assert [task.label for task in tasks] == ["0", "1"]
    assert [task.metadata for task in tasks] == [{"level": 0}, {"level": 1}]
    assert [(task.group_index, task.first_sample_index, task.epoch, task.row) for task in tasks] == [
        (0, 0, 0, 0),
        (1, 4, 0, 1),
    ]
    assert cursor == PromptCursor(epoch=0, offset=2, next_group_index=2, next_sample_index=8)


def test_one_take_may_cross_several_epochs(six: Path) -> None:
    tasks, cursor = PromptSource(six, shuffle=True).take(PromptCursor(), 15)
    assert [task.epoch for task in tasks] == [0] * 6 + [1] * 6 + [2] * 3
    assert sorted(task.row for task in tasks[:6]) == sorted(task.row for task in tasks[6:12]) == list(range(6))
    assert (cursor.epoch, cursor.offset) == (2, 3)


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> PromptSource:
    records = [{"input": f"question {i}"} for i in range(7)]
    return PromptSource(
        write_jsonl(tmp_path_factory.mktemp("data") / "seven.jsonl", records), shuffle=True, n_samples_per_prompt=3
    )


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 9), max_size=6))
def test_the_stream_does_not_depend_on_how_it_is_taken(shuffled: PromptSource, sizes: list[int]) -> None:
    whole, end = shuffled.take(PromptCursor(), sum(sizes))
    parts, cursor = [], PromptCursor()
    for size in sizes:
        tasks, cursor = shuffled.take(cursor, size)
        parts += tasks
    assert parts == whole
    assert cursor == end


def test_shuffling_depends_on_seed_and_epoch_only() -> None:
    order = epoch_order(8, shuffle=True, seed=42, epoch=0).tolist()
    assert order == epoch_order(8, shuffle=True, seed=42, epoch=0).tolist()
    assert sorted(order) == list(range(8))
    assert len({tuple(epoch_order(8, shuffle=True, seed=s, epoch=e)) for s in range(4) for e in range(4)}) == 16
    first = [int(epoch_order(10, shuffle=True, seed=seed, epoch=0)[0]) for seed in range(2000)]
    assert all(140 < first.count(row) < 260 for row in range(10))


def test_the_shuffle_never_changes_between_releases() -> None:
    assert epoch_order(8, shuffle=True, seed=42, epoch=0).tolist() == FROZEN_ORDER


def test_a_slice_selects_records_and_keeps_their_row_numbers(six: Path) -> None:
    source = PromptSource(f"{six}@[2:4]")
    assert len(source) == 2
    assert [task.row for task in source.take(PromptCursor(), 3)[0]] == [2, 3, 2]
    assert len(PromptSource(f"{six}@[4:]")) == len(PromptSource(f"{six}@[:-4]")) == 2
    with pytest.raises(DataError, match="the slice selects none of 6 records"):
        PromptSource(f"{six}@[6:9]")
    with pytest.raises(DataError, match="can't read the slice"):
        PromptSource(f"{six}@[a:b]")


def test_the_chat_template_sees_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"input": messages}, {"input": "hello"}])
    render = PromptSource(path, apply_chat_template=lambda chat: "|".join(message["content"] for message in chat))
    assert [task.prompt for task in render.take(PromptCursor(), 2)[0]] == ["be brief|hi", "hello"]
    assert PromptSource(path).take(PromptCursor(), 1)[0][0].prompt == messages


def test_any_fsspec_url_is_read() -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/prompts/a.jsonl", b'{"input": "in memory"}\n')
    assert PromptSource("memory://prompts/a.jsonl").take(PromptCursor(), 1)[0][0].prompt == "in memory"
    filesystem.rm("/prompts", recursive=True)


def test_bom_crlf_empty_lines_long_lines_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    long = "x" * 20_000_000
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n\r\n  \n{"input": "%s"}\n{"input": "b"}' % long.encode())
    source = PromptSource(path)
    assert [task.prompt for task in source.take(PromptCursor(), 3)[0]] == ["a", long, "b"]
    assert source.where(1) == f"{path}:4"


@pytest.mark.parametrize(
    ("line", "place", "reason"),
    [
        (b'{"input": "a",}', "3:15", "bad JSON"),
        (b'{"input": "a", "label": 1, "label": 2}', "3:28", "duplicate key 'label'"),
        (b'{"input": "a", "label": NaN}', "3:25", "NaN is not a finite number"),
        (b'{"input": "\xff"}', "3:12", "byte 0xff is not UTF-8"),
        (b'{"text": "a", "id": 4}', "3:1", r"no key 'input'; the record has \['id', 'text'\]"),
        (b'["a"]', "3:1", "a record must be an object, found list"),
        (b'{"id": 1, "input": 7}', "3:11", "'input' must be a string or a list of messages, found int"),
        (b'{"id": 1, "input": null}', "3:11", "found null"),
        (b'{"input": ""}', "3:2", "'input' is empty"),
        (b'{"input": []}', "3:2", "'input' is empty"),
        (b'{"input": ["a"]}', "3:2", "message 0 must be an object with role and content"),
        (b'{"input": "a", "metadata": [1]}', "3:16", "'metadata' must be an object, found list"),
    ],
)
def test_a_malformed_record_stops_with_file_line_and_column(
    line: bytes, place: str, reason: str, tmp_path: Path
) -> None:
    path = with_line(tmp_path / "bad.jsonl", line)
    with pytest.raises(DataError, match=rf"{path}:{place}: .*{reason}.*\. Correct the record"):
        PromptSource(path)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("flag", "keys"),
    [
        ("--input-key", {"input_key": "promt"}),
        ("--label-key", {"input_key": "prompt", "label_key": "answr"}),
    ],
)
@pytest.mark.parametrize("on_bad_record", ["stop", "skip"])
def test_a_key_that_no_record_has_points_to_its_flag(
    write: Any, flag: str, keys: dict[str, str], on_bad_record: Any, tmp_path: Path
) -> None:
    suffix = "jsonl" if write is write_jsonl else "parquet"
    path = write(tmp_path / f"data.{suffix}", [{"prompt": "a", "answer": "b"}] * 3)
    with pytest.raises(DataError, match=r"has \['answer', 'prompt'\]") as caught:
        PromptSource(path, on_bad_record=on_bad_record, **keys)
    assert caught.value.next_step.startswith(f"Correct {flag}")


def test_a_cut_off_last_line_is_called_that(tmp_path: Path) -> None:
    path = with_line(tmp_path / "cut.jsonl", b'{"input": "a"}', last=b'{"input": "a", "la')
    with pytest.raises(DataError, match=r"cut.jsonl:5:16: bad JSON .* the last line has no newline and may be cut off"):
        PromptSource(path)


def test_bad_records_are_set_aside_on_request(tmp_path: Path) -> None:
    path = with_line(tmp_path / "bad.jsonl", b'{"input": NaN}', last=b'{"inp')
    aside = tmp_path / "aside.jsonl"
    source = PromptSource(path, on_bad_record="skip")
    assert (len(source), len(source.bad_records), source.num_records) == (3, 2, 5)
    assert [task.row for task in source.take(PromptCursor(), 3)[0]] == [0, 1, 3]
    source.write_bad_records(aside)
    assert [json.loads(line) for line in aside.read_text().splitlines()] == [
        {"where": f"{path}:3:11", "reason": "NaN is not a finite number", "text": '{"input": NaN}'},
        {
            "where": f"{path}:5:2",
            "reason": "bad JSON (Unterminated string starting at); the last line has no newline and may be cut off",
            "text": '{"inp',
        },
    ]


def test_a_bad_line_of_20_mb_is_named_in_few_words_and_set_aside_whole(tmp_path: Path) -> None:
    line = b'{"input": "' + b"x" * 20_000_000 + b'", "input": "y"}'
    path = with_line(tmp_path / "long.jsonl", line)
    with pytest.raises(DataError, match=rf"{path}:3:20000015: duplicate key 'input'") as caught:
        PromptSource(path)
    assert len(str(caught.value)) < 500
    PromptSource(path, on_bad_record="skip").write_bad_records(tmp_path / "aside.jsonl")
    assert json.loads((tmp_path / "aside.jsonl").read_text())["text"] == line.decode()


def test_bad_records_that_cannot_be_written_aside_are_told(tmp_path: Path) -> None:
    source = PromptSource(with_line(tmp_path / "bad.jsonl", b"x"), on_bad_record="skip")
    with pytest.raises(DataError, match="can't write the bad records aside"):
        source.write_bad_records(tmp_path / "missing" / "aside.jsonl")


def test_too_many_bad_records_stop_even_when_skipping(tmp_path: Path) -> None:
    path = with_line(tmp_path / "bad.jsonl", b"x")
    with pytest.raises(DataError, match=r"1 of 4 records are bad, allowed: a fraction of 0.2. The first: .*:3:1: bad"):
        PromptSource(path, on_bad_record="skip", max_bad_fraction=0.2)


def test_places_of_records_are_those_that_the_source_names(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"input": "a"}\r\n\r\n  \n{"input": "b"}\n{"input": "c"}')
    source = PromptSource(path)
    assert record_places(str(path), [2, 0]) == {row: source.where(row) for row in (0, 2)}
    assert record_places(str(path), [1, 7]) == {1: f"{path}:5"}
    assert record_places("a.parquet", [3]) == {3: "a.parquet:row 3"}
    with pytest.raises(DataError, match="can't be read"):
        record_places(str(tmp_path / "missing.jsonl"), [0])


def test_parquet_faults_name_row_and_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"input": "a", "label": 1.0}, {"input": "b", "label": float("nan")}])
    with pytest.raises(DataError, match=r"a.parquet:row 1:label: 'label' holds nan, not a finite number"):
        PromptSource(path, label_key="label")
    with pytest.raises(DataError, match=r"no column 'prompt'; the file has \['input', 'label'\]"):
        PromptSource(path, input_key="prompt")
    dates = write_parquet(tmp_path / "b.parquet", [{"input": "a", "label": datetime.date(2026, 1, 1)}])
    with pytest.raises(DataError, match=r"row 0:label: 'label' holds a value of type date"):
        PromptSource(dates, label_key="label")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(BadRecordError, match=r"c.parquet: can't be read: .*[^.]\. Restore the file"):
        PromptSource(tmp_path / "c.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message", "kind"),
    [
        ("missing.jsonl", None, "no such file", DataError),
        ("data.csv", b"a,b\n", "unknown kind of prompt file, allowed: .jsonl, .parquet", DataError),
        ("empty.jsonl", b"\n\n", "the file has no records", BadRecordError),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    name: str, content: bytes | None, message: str, kind: type[DataError], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        PromptSource(tmp_path / name)
    assert type(caught.value) is kind


def test_an_address_that_cannot_be_reached_is_told_with_the_reason() -> None:
    with pytest.raises(
        DataError, match=r"a.jsonl: can't be fetched: Cannot connect to host 127.0.0.1:1 .*this machine"
    ):
        PromptSource("http://127.0.0.1:1/a.jsonl")


def test_a_folder_with_the_name_of_a_prompt_file_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a.jsonl: no file but a directory"):
        PromptSource(tmp_path / "a.jsonl")


def test_a_file_that_went_away_is_told_when_it_is_read(tmp_path: Path) -> None:
    six = tmp_path / "six.jsonl"
    six.write_text('{"input": "a"}\n' * 6)
    source = PromptSource(six)
    six.unlink()
    with pytest.raises(DataError, match=f"{six}: can't be read any more: .*No such file"):
        source.take(source.cursor_at(0), 1)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(DataError, match=r"nothing://x.jsonl: can't be read"):
        PromptSource("nothing://x.jsonl")


def test_the_digest_changes_with_content_rows_and_keys(six: Path, tmp_path: Path) -> None:
    digest = PromptSource(six).dataset_digest()
    assert PromptSource(six, shuffle=True).dataset_digest() == digest
    assert PromptSource(six, label_key="label").dataset_digest() != digest
    assert PromptSource(f"{six}@[0:5]").dataset_digest() != digest
    assert PromptSource(f"{six}@[0:6]").dataset_digest() == digest
    other = write_jsonl(tmp_path / "other.jsonl", [*GOOD[:5], {"input": "changed"}])
    assert PromptSource(other).dataset_digest() != digest
