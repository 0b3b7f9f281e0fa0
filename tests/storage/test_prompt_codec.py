from __future__ import annotations

import msgspec
import pytest

from storage.prompt_codec import decode_prompt, encode_prompt
from vime.data.cursor import PromptTask
from vime.errors import CorruptDataError, SampleError, SchemaVersionError

TASK = PromptTask(
    group_index=3,
    first_sample_index=24,
    epoch=1,
    row=7,
    prompt=[{"role": "user", "content": "how many?"}],
    label=10**30,
    metadata={"tools": [{"name": "calc"}], "weights": (0.5, None)},
)


def test_a_prompt_comes_back_exactly() -> None:
    assert decode_prompt(encode_prompt(TASK)) == TASK


def test_a_newer_prompt_is_refused_with_both_versions() -> None:
    with pytest.raises(SchemaVersionError, match="schema version 2, this code reads up to 1"):
        decode_prompt(msgspec.msgpack.encode({"schema_version": 2}))


@pytest.mark.parametrize("data", [b"", b"junk", encode_prompt(TASK)[:-1], msgspec.msgpack.encode({"row": 1})])
def test_a_damaged_prompt_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError, match="can't be read"):
        decode_prompt(data)


def test_a_label_that_would_not_survive_is_named() -> None:
    with pytest.raises(SampleError, match=r"label\[0\]: a value of type builtins.set"):
        encode_prompt(msgspec.structs.replace(TASK, label=[{1}]))
