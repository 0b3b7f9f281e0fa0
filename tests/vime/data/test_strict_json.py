from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.strict_json import JsonFault, key_column, loads_strict

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(JSON)
def test_whatever_json_writes_is_read(value: object) -> None:
    if "\\ud" not in json.dumps(value):
        assert loads_strict(json.dumps(value).encode()) == value


@settings(max_examples=50)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, min_size=1, max_size=4))
def test_a_repeated_key_is_found_wherever_it_is(value: dict[str, object]) -> None:
    key = next(iter(value))
    text = json.dumps(value, ensure_ascii=False)[:-1]
    repeated = f"{text}, {json.dumps(key, ensure_ascii=False)}: 1}}"
    try:
        repeated.encode()
    except UnicodeEncodeError:
        return
    with pytest.raises(JsonFault, match="duplicate key") as fault:
        loads_strict(repeated.encode())
    assert fault.value.column == len(text) + 3


@pytest.mark.parametrize(
    ("text", "reason", "column"),
    [
        ('{"a": 1,}', "bad JSON", 9),
        ('{"a": "NaN", "b": NaN}', "NaN is not a finite number", 19),
        ('{"a": [1, -Infinity]}', "-Infinity is not a finite number", 11),
        ('{"a": 1e999}', "1e999 is not a finite number", 7),
        ('{"a": {"b": 1}, "c": {"b": 1, "b": 2}}', "duplicate key 'b'", 31),
        ('[{"a": 1}, {"a": 1}, {"a": [], "\\u0061": 1}]', "duplicate key 'a'", 32),
        ('{"a": "x\\ud800"}', "unpaired surrogate", 9),
        ('{"a": "caf', "bad JSON", 7),
        ("[" * 100000, "nested too deeply", 1),
        ("", "bad JSON", 1),
    ],
)
def test_faults_have_a_reason_and_a_column(text: str, reason: str, column: int) -> None:
    with pytest.raises(JsonFault, match=reason) as fault:
        loads_strict(text.encode())
    assert fault.value.column == column


def test_bytes_that_are_not_utf8_have_a_column() -> None:
    with pytest.raises(JsonFault, match="byte 0xff is not UTF-8") as fault:
        loads_strict('{"é": "'.encode() + b'\xff"}')
    assert fault.value.column == 8


def test_key_column_looks_only_at_the_outermost_object() -> None:
    assert key_column('{"a": {"b": 1}, "b": 2}', "b") == 17
    assert key_column('{"a": {"b": 1}}', "b") == 1
