"""Versions are loaded by copies where these prove to be all that vLLM does, and by vLLM elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.backends.vllm_utils.plugin.copy_plan import CopyPlan, NotCopies, plan_of
from vime.backends.vllm_utils.plugin.copy_recorder import CopyRecorder

REPOSITORY = Path(__file__).resolve().parents[5]
WORKER = Path(__file__).with_name("copy_plan_worker.py")


_OTHERS = torch.library.Library("vime_test", "DEF")
_OTHERS.define("reads(Tensor weight) -> int")
_OTHERS.impl("reads", lambda _: 0, "CompositeImplicitAutograd")  # what it does is hidden from dispatch


class Merged(torch.nn.Module):
    """Two received matrices in one parameter, as vLLM merges projections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)


def received(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    """Two tensors in one storage, as a packet brings them."""
    packet = torch.randn(24, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [("up", packet[:16].view(4, 4)), ("down", packet[16:].view(2, 4))]


def load(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    whole = torch.empty(6, 4)
    for (_, tensor), rows in zip(tensors, (slice(0, 4), slice(4, 6)), strict=True):
        whole[rows].copy_(tensor)
    model.weight.data.copy_(whole)


def planned(loading: Any, tensors: list[tuple[str, torch.Tensor]] | None = None) -> tuple[Merged, CopyPlan]:
    model, tensors = Merged(), tensors or received()
    recorder = CopyRecorder(tensors)
    with recorder:
        loading(model, tensors)
    return model, plan_of(model, tensors, recorder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_fill_a_merged_parameter_as_the_load_did(dtype: torch.dtype) -> None:
    model, plan = planned(load, received(0, dtype))
    another, expected = received(1, dtype), Merged()
    load(expected, another)
    arranged = plan.arrange(another)
    assert arranged is not None
    assert plan.num_copies == 2
    arranged.run()
    assert torch.equal(model.weight, expected.weight)


def test_rows_that_pad_a_parameter_keep_their_constant() -> None:
    def padding(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
        model.weight[:4].copy_(tensors[0][1])
        model.weight[4:].fill_(7.0)

    model, plan = planned(padding)
    arranged = plan.arrange(received(1))
    assert arranged is not None
    arranged.run()
    assert torch.equal(model.weight[:4], received(1)[0][1])
    assert bool((model.weight[4:] == 7.0).all())


def test_tensors_of_another_form_are_not_arranged() -> None:
    _, plan = planned(load)
    (first, up), second = received(1)
    for others in ([(first, up)], [("other", up), second], [(first, up.to(torch.bfloat16)), second]):
        assert plan.arrange(others) is None
    assert plan.arrange([(first, up.T), second]) is None


def scales(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, [(name, tensor * 2) for name, tensor in tensors])


def scales_in_place(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.weight.data.mul_(2)


def derives(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.transposed = model.weight.t().contiguous()


def leaves_a_gap(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    model.weight[:4].copy_(tensors[0][1])


def writes_twice(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.weight[:2].copy_(tensors[1][1])


def overwrites_with_a_constant(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.weight[:1].zero_()


def goes_round(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.weight.data = torch.from_numpy(model.weight.numpy() + 1)


def keeps_some_elsewhere(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    for rows in range(0, 6, 2):
        model.weight[rows : rows + 2].copy_(tensors[1][1])
    model.other = torch.empty(4, 4).copy_(tensors[0][1])


def leaves_a_parameter_out(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    model.bias = torch.nn.Parameter(torch.zeros(6), requires_grad=False)


def is_changed_unseen(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    memory = model.weight.numpy()
    load(model, tensors)
    memory[0] += 1


def calls_an_operation_of_others(model: Merged, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load(model, tensors)
    torch.ops.vime_test.reads(model.weight)


@pytest.mark.parametrize(
    ("loading", "reason"),
    [
        (scales, "computes with weights"),
        (scales_in_place, "computes with weights"),
        (derives, "computes with weights"),
        (leaves_a_gap, "is not written"),
        (writes_twice, "written twice"),
        (overwrites_with_a_constant, "written twice"),
        (goes_round, "numpy reads weights"),
        (keeps_some_elsewhere, "up went somewhere else"),
        (leaves_a_parameter_out, "no received weight was seen to go into bias"),
        (is_changed_unseen, "the model holds something else than up"),
        (calls_an_operation_of_others, "vime_test::reads reads weights"),
    ],
)
def test_a_load_that_is_more_than_copies_is_refused(loading: Any, reason: str) -> None:
    with pytest.raises(NotCopies, match=reason):
        planned(loading)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plans")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(WORKER), str(folder)]
        ended = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=110, check=False)
    assert ended.returncode == 0, (folder / "log").read_text()[-3000:]
    content: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense", "untied", "experts"])
def test_a_real_model_holds_bit_for_bit_what_vllm_would_have_loaded(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    assert found[case]["planned"]
    assert found[case]["falls_back"]
    assert found[case]["num_copies"] >= found[case]["num_tensors"] - 1  # a tied head may come along for nothing
    assert found[case]["num_compared"] > 10_000
    assert found[case]["differs"] == []


@pytest.mark.slow
def test_a_model_that_packs_its_weights_is_loaded_by_vllm(found: dict[str, dict[str, Any]]) -> None:
    assert not found["packed"]["planned"]
    assert found["packed"]["differs"] == []
