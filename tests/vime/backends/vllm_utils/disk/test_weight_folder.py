"""Reading and verifying weights in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.backends.vllm_utils.disk.writer import VersionWriter, WrittenVersion
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder
from vime.errors import PublicationError

WEIGHTS = [
    ("embed", torch.randn(5, 3)),
    ("scalar", torch.tensor(2.0, dtype=torch.bfloat16)),
    ("empty", torch.empty(0, 4)),
    ("turned", torch.randn(4, 6, dtype=torch.float16).T),
    ("whole", torch.arange(7)),
]


@pytest.fixture
def written(tmp_path: Path) -> WrittenVersion:
    return VersionWriter(tmp_path, file_bytes=64).write(1, WEIGHTS)


def folder(tmp_path: Path) -> Path:
    return tmp_path / "weight_v000001"


def test_a_written_folder_verifies_and_reads_back_in_order(tmp_path: Path, written: WrittenVersion) -> None:
    receipt = written.receipt
    assert len(list(folder(tmp_path).glob("*.safetensors"))) > 1
    verify_weight_folder(folder(tmp_path), receipt.names, receipt.digest)
    received = list(read_weight_folder(folder(tmp_path), receipt.names))
    assert [name for name, _ in received] == [name for name, _ in WEIGHTS]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(received, WEIGHTS, strict=True))


def test_a_changed_value_is_found(tmp_path: Path, written: WrittenVersion) -> None:
    file = min(folder(tmp_path).glob("*.safetensors"))
    tensors = load_file(file)
    tensors["embed"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(PublicationError, match=r"has digest .*, expected"):
        verify_weight_folder(folder(tmp_path), written.receipt.names, written.receipt.digest)


def test_missing_and_extra_tensors_are_named(tmp_path: Path, written: WrittenVersion) -> None:
    receipt = written.receipt
    with pytest.raises(PublicationError, match=r"missing tensors \['other'\], unexpected tensors \['whole'\]"):
        verify_weight_folder(folder(tmp_path), [*receipt.names[:-1], "other"], receipt.digest)


def test_an_unreadable_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PublicationError, match=r"holds no \*\.safetensors files"):
        verify_weight_folder(tmp_path, [], "")
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(PublicationError, match="can't be read"):
        verify_weight_folder(tmp_path, ["a"], "")
