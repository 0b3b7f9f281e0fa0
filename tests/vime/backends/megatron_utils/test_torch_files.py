"""One rank's file of the `torch` format: numbers are read and written in their place."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from vime.backends.megatron_utils.torch_files import RankFile, write_frame
from vime.errors import ModelError

WEIGHTS = {"w": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "none": torch.zeros(0)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in WEIGHTS.items()}
    write_frame(path, {"model": {"extra": None}, "iteration": 3}, tensors)
    with RankFile(path, writable=True) as opened:
        for name, tensor in WEIGHTS.items():
            opened.write(opened.state["model"][name], tensor)
    return path


def test_torch_loads_what_was_filled_in(file: Path) -> None:
    state = torch.load(file, weights_only=True)
    assert (state["iteration"], state["model"].pop("extra")) == (3, None)
    assert state["model"].keys() == WEIGHTS.keys()
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in WEIGHTS.items())


def test_files_that_torch_saved_are_read_tensor_by_tensor(tmp_path: Path) -> None:
    base = torch.arange(20.0).reshape(4, 5)
    torch.save({"model": {"base": base, "rows": base[2:]}, "args": Namespace(num_layers=2)}, tmp_path / "f.pt")
    torch.serialization.add_safe_globals([Namespace])
    with RankFile(tmp_path / "f.pt") as file:
        model = file.state["model"]
        assert model["base"].device.type == "meta"
        assert torch.equal(file.read(model["base"]), base)
        assert torch.equal(file.read(model["rows"]), base[2:])
        assert file.state["args"].num_layers == 2


def test_a_file_cut_short_is_named(file: Path) -> None:
    with RankFile(file) as opened:
        like = opened.state["model"]["w"]
        file.write_bytes(file.read_bytes()[: like.untyped_storage()._checkpoint_offset + 8])
        with pytest.raises(ModelError, match=r"model_optim_rng\.pt ends before byte"):
            opened.read(like)


def test_strided_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"t": torch.randn(3, 4).T}, tmp_path / "f.pt")
    with RankFile(tmp_path / "f.pt") as file, pytest.raises(ModelError, match=r"strides \(1, 4\), allowed: contiguous"):
        file.read(file.state["t"])


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("run while loading",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": _Trap()}, tmp_path / "f.pt")
    with pytest.raises(ModelError, match="can't be read"):
        RankFile(tmp_path / "f.pt")
    (tmp_path / "g.pt").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(ModelError, match="can't be read"):
        RankFile(tmp_path / "g.pt")
    assert capsys.readouterr().out == ""
