"""A tokenizer that can't be loaded is named, whatever its library raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import build_tokenizer
from vime.errors import ModelError
from vime.rollout.tokenizer import load_tokenizer, read_tokenizer_file


@pytest.mark.parametrize("damage", ["{", "[]", '{"model": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    build_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ModelError, match=r"--hf-checkpoint .*: its tokenizer can't be loaded: ") as caught:
        load_tokenizer(str(tmp_path))
    assert "Restore the tokenizer's files" in caught.value.next_step
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read: "):
        read_tokenizer_file(tmp_path)


def test_a_folder_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"--hf-checkpoint {tmp_path}: its tokenizer can't be loaded: "):
        load_tokenizer(str(tmp_path))
    assert read_tokenizer_file(tmp_path) is None


def test_both_read_the_same(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    ids = load_tokenizer(str(tmp_path)).encode("abc", add_special_tokens=False)
    assert read_tokenizer_file(tmp_path).encode("abc", add_special_tokens=False).ids == ids
