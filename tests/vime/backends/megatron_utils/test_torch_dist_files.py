"""The `torch_dist` format without Megatron: parts of tensors, damage, and what may not be unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from vime.backends.megatron_utils import torch_dist_files
from vime.backends.megatron_utils.torch_dist_files import TorchDistReader, TorchDistWriter
from vime.errors import ModelError

WHOLE = torch.arange(48.0).reshape(2, 6, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One tensor [2, 6, 4] as four parts [1, 3, 4], and one object."""
    writer = TorchDistWriter(tmp_path)
    for layer in (0, 1):
        for row in (0, 3):
            writer.add_part("w", (2, 6, 4), (layer, row, 0), WHOLE[layer : layer + 1, row : row + 3])
    writer.add_object("o/shard_0_1", b"bytes")
    writer.finish()
    return tmp_path


@pytest.mark.parametrize(
    ("offset", "size"), [((0, 0, 0), (2, 6, 4)), ((1, 2, 1), (1, 3, 2)), ((0, 5, 3), (2, 1, 1)), ((1, 0, 0), (1, 6, 4))]
)
def test_any_part_is_put_together_from_the_parts_that_hold_it(
    folder: Path, offset: tuple[int, ...], size: tuple[int, ...]
) -> None:
    part = TorchDistReader(folder).read("w", offset, size)
    wanted = WHOLE[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
    assert torch.equal(part, wanted)


def test_torchs_own_loader_reads_it(folder: Path) -> None:
    state = {"w": torch.zeros(2, 6, 4)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["w"], WHOLE)


def test_a_part_that_nobody_wrote_is_missed(folder: Path) -> None:
    with pytest.raises(ModelError, match="w holds 8 of 16 numbers"):
        TorchDistReader(folder).read("w", (1, 4, 0), (2, 2, 4))


def test_full_files_are_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist_files, "FILE_BYTES", 1000)
    writer = TorchDistWriter(tmp_path)
    for number in range(3):
        writer.add_part(f"w{number}", (4,), (0,), torch.full((4,), float(number)))
    writer.finish()
    assert len(list(tmp_path.glob("*.distcp"))) == 3
    assert TorchDistReader(tmp_path).read("w2", (0,), (4,)).tolist() == [2.0] * 4


def test_an_absent_file_is_named(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ModelError, match=r"files that are absent: __0_0\.distcp"):
        TorchDistReader(folder)


def test_damaged_numbers_are_named_with_their_place(folder: Path) -> None:
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[:40] = bytes(40)
    (folder / "__0_0.distcp").write_bytes(content)
    with pytest.raises(ModelError, match="w at byte 0 can't be read"):
        TorchDistReader(folder).read("w", (0, 0, 0), (1, 1, 1))


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("run while loading",))


def test_a_table_of_contents_that_would_run_code_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(ModelError, match=r"builtins\.print is not part of the format"):
        TorchDistReader(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"not a pickle"])
def test_a_damaged_table_of_contents_is_named(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ModelError, match=r"\.metadata can't be read"):
        TorchDistReader(folder)
