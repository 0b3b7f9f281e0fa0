"""Dead letters: durable, complete, and readable while they are written."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from storage.dead_letters import DeadLetterBox, read_letters
from storage.plain_json import to_plain_json
from vime.errors import RewardError, SampleError
from vime.utils.types import Sample


def put(box: DeadLetterBox, group_index: int, error: Exception, **changes: object) -> None:
    given = {
        "reason": "reward_none",
        "group_index": group_index,
        "attempt": 1,
        "samples": [Sample(group_index=group_index, index=2 * group_index, tokens=[1, 2])],
        "prompt_ref": None,
        "payload_ref": None,
    }
    box.put(error, **{**given, **changes})  # type: ignore[arg-type]


def chained() -> RewardError:
    try:
        try:
            raise KeyError("no such environment")
        except KeyError as cause:
            raise RewardError("the reward raised KeyError") from cause
    except RewardError as error:
        return error


def test_letters_of_several_writers_are_read_in_the_order_of_their_time(tmp_path: Path) -> None:
    boxes = [DeadLetterBox(tmp_path, "producer-0"), DeadLetterBox(tmp_path, "producer-0")]
    for group_index in range(6):
        put(boxes[group_index % 2], group_index, RewardError("the reward is None"))
    letters, unreadable = read_letters(tmp_path)
    assert [letter.group_index for letter in letters] == list(range(6))
    assert len(list(tmp_path.iterdir())) == 2, "one writer a file"
    assert unreadable == []


def test_a_letter_keeps_the_sample_and_the_trace_with_its_cause(tmp_path: Path) -> None:
    put(DeadLetterBox(tmp_path, "w"), 3, chained())
    ((letter,), _) = read_letters(tmp_path)
    assert (letter.group_index, letter.sample_indices) == (3, [6])
    assert (letter.reason, letter.error) == ("reward_none", "RewardError")
    assert letter.samples is not None
    assert letter.samples[0]["tokens"] == [1, 2]
    assert letter.traceback is not None
    assert "KeyError: 'no such environment'" in letter.traceback
    assert "in chained" in letter.traceback


def test_a_fault_that_a_check_found_has_no_trace(tmp_path: Path) -> None:
    put(DeadLetterBox(tmp_path, "w"), 0, SampleError("loss_mask has 2 entries, allowed: 3."))
    assert read_letters(tmp_path)[0][0].traceback is None


def test_a_line_that_is_being_written_is_not_read_and_is_cut_off_by_the_next(tmp_path: Path) -> None:
    box = DeadLetterBox(tmp_path, "w")
    put(box, 0, RewardError("a"))
    whole = box.path.read_bytes()
    box.path.write_bytes(whole + whole[: len(whole) // 2])
    assert [letter.group_index for letter in read_letters(tmp_path)[0]] == [0]
    put(box, 1, RewardError("b"))
    letters, unreadable = read_letters(tmp_path)
    assert ([letter.group_index for letter in letters], unreadable) == ([0, 1], [])


def test_letters_of_groups_that_fail_at_once_come_out_whole(tmp_path: Path) -> None:
    box = DeadLetterBox(tmp_path, "w")
    samples = [Sample(index=0, tokens=list(range(20_000)))]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: put(box, number, RewardError("a"), samples=samples), range(64)))
    letters, unreadable = read_letters(tmp_path)
    assert ([str(line) for line in unreadable], sorted(letter.group_index for letter in letters)) == ([], [*range(64)])


def test_damaged_lines_and_newer_versions_are_told_and_hide_no_letter(tmp_path: Path) -> None:
    box = DeadLetterBox(tmp_path, "w")
    put(box, 0, RewardError("a"))
    newer = json.loads(box.path.read_bytes()) | {"version": 9}
    with box.path.open("ab") as file:
        file.write(b"{]\n" + json.dumps(newer).encode() + b"\n")
    put(box, 1, RewardError("b"))
    letters, unreadable = read_letters(tmp_path)
    assert [letter.group_index for letter in letters] == [0, 1]
    assert [str(line).split(": ")[0] for line in unreadable] == [f"{box.path}:2", f"{box.path}:3"]
    assert "version 9, this vime reads up to 1" in str(unreadable[1])


def test_a_pool_without_letters_has_none(tmp_path: Path) -> None:
    assert read_letters(tmp_path) == ([], [])


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_evidence_is_never_refused_and_what_json_lacks_is_tagged() -> None:
    cycle: list[object] = [1]
    cycle.append(cycle)
    value = {
        "nan": math.nan, "big": 2**70, "bytes": b"\x00\xff", "tuple": (1, 2), "keys": {3: "a"}, "cycle": cycle,
        "array": np.arange(3, dtype=np.int32), "scalar": np.float32(0.5), "odd": Unprintable(), "half": "a\ud800b",
        "status": Sample.Status.FAILED,
    }  # fmt: skip
    found = to_plain_json(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["nan"] == {"$float": "nan"}
    assert found["big"] == {"$int": str(2**70)}
    assert found["bytes"] == {"$bytes": "AP8="}
    assert found["tuple"] == {"$tuple": [1, 2]}
    assert found["keys"] == {"$dict": [[3, "a"]]}
    assert found["cycle"] == [1, {"$cycle": 1}]
    assert found["array"] == {"$array": {"dtype": "<i4", "shape": [3], "data": "AAAAAAEAAAACAAAA"}}
    assert found["scalar"]["$array"]["shape"] == []
    assert found["odd"]["type"].endswith("Unprintable")
    assert "its repr raised ValueError" in found["odd"]["$repr"]
    assert found["half"] == "a\\ud800b"
    assert found["status"] == "failed"


@pytest.mark.parametrize("depth", [200, 5000])
def test_deep_values_are_cut_off_and_not_refused(depth: int) -> None:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    assert "$too_deep" in json.dumps(to_plain_json(value))
