"""Hugging Face checkpoints tensor by tensor: what is written is what the library reads, and what is absent is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.backends.megatron_utils import safetensors_files
from vime.backends.megatron_utils.safetensors_files import INDEX, SafetensorsReader, write_checkpoint
from vime.errors import ModelError

WEIGHTS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.randn(4, 2).bfloat16(),
    "c.bias": torch.randn(5, dtype=torch.float64),
    "d.weight": torch.randn(3).half(),
    "e.weight": torch.zeros(0, 4),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_text("t")
    (folder / "vime_export.json").write_text("{}")
    return folder


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    )


def test_one_file_holds_all_weights_beside_configuration_and_tokenizer(source: Path, tmp_path: Path) -> None:
    write_checkpoint(WEIGHTS.items(), source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize("limit", ["SHARD_BYTES", "_HEADER_BYTES"])
def test_full_files_are_followed_by_others_and_an_index(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(safetensors_files, limit, {"SHARD_BYTES": 41, "_HEADER_BYTES": 512}[limit])
    write_checkpoint(WEIGHTS.items(), source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert_equal({name: tensor for path in files for name, tensor in load_file(path).items()})
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    with SafetensorsReader(tmp_path / "out") as reader:
        assert_equal({name: reader.read(name) for name in index["weight_map"]})


def test_a_tensor_is_written_before_the_next_is_asked_for(source: Path, tmp_path: Path) -> None:
    sizes = []

    def weights() -> object:
        for name in "abc":
            yield name, torch.ones(1 << 18)
            sizes.append((tmp_path / "out" / "part-00001.safetensors").stat().st_size)

    write_checkpoint(weights(), source, tmp_path / "out")  # type: ignore[arg-type]
    assert sizes[0] >= 1 << 20
    assert sizes[2] - sizes[0] >= 2 << 20


def test_an_absent_file_of_the_index_is_named(source: Path) -> None:
    save_file({"a": torch.ones(1)}, source / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (source / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"files that are absent: model-00002-of-00002\.safetensors"):
        SafetensorsReader(source)


def test_a_weight_that_the_index_promises_and_no_file_holds_is_named(source: Path) -> None:
    save_file({"a": torch.ones(1)}, source / "model.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    with pytest.raises(ModelError, match="names weights that its files lack: b"):
        SafetensorsReader(source)


def test_a_damaged_file_is_named(source: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read"):
        SafetensorsReader(source)


def test_a_folder_without_weights_is_refused(source: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        SafetensorsReader(source)


def test_compressed_weights_are_refused_by_dtype(source: Path) -> None:
    save_file({"a": torch.ones(1, dtype=torch.int8)}, source / "model.safetensors")
    with SafetensorsReader(source) as reader, pytest.raises(ModelError, match="a is I8, allowed: F32, BF16, F16"):
        reader.dtype("a")
