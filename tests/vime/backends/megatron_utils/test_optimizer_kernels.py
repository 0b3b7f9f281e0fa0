"""What takes a few kernels for all parameters together, against one parameter after the other."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.shim import copy_all, norm_of_all, prepare_megatron, scale_all

prepare_megatron()

from megatron.core.utils import local_multi_tensor_l2_norm  # noqa: E402

from vime.backends.megatron_utils.optimizer import take_steps_at_once  # noqa: E402

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
NO_FLAG = torch.zeros(1)


def some_tensors(device: str, seed: int = 0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=chance).to(device) for shape in ((3, 4), (5,), (2, 2, 2))]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_the_norm_of_many_tensors_is_megatrons(device: str) -> None:
    tensors = some_tensors(device)
    expected, _ = local_multi_tensor_l2_norm(0, NO_FLAG, [tensors], False)
    found, single = norm_of_all(0, NO_FLAG, [tensors], False)
    assert found.shape == expected.shape == (1,)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert single is None


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_tensors_are_scaled_in_place_and_into_others(device: str) -> None:
    tensors = some_tensors(device)
    others = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    scale_all(0, NO_FLAG, [tensors, others], 0.5)
    assert all(torch.equal(other, tensor * 0.5) for other, tensor in zip(others, tensors, strict=True))
    scale_all(0, NO_FLAG, [others, others], 4.0)
    assert all(torch.equal(other, tensor * 2) for other, tensor in zip(others, tensors, strict=True))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_tensors_are_copied_into_those_of_another_dtype(device: str) -> None:
    tensors = some_tensors(device)
    others = [tensor.new_zeros(tensor.shape, dtype=torch.bfloat16) for tensor in tensors]
    copy_all(this=tensors, that=others, overflow_buf=None)
    copy_all([], [])
    assert all(torch.equal(other, tensor.bfloat16()) for other, tensor in zip(others, tensors, strict=True))


def stepped(device: str, *, fused: bool) -> tuple[list[torch.Tensor], torch.optim.Adam]:
    """Parameters after a step of a state that has counted three on the CPU, one count for all, and a further step."""
    parameters = [torch.nn.Parameter(tensor) for tensor in some_tensors(device)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    shared = torch.tensor(3.0)
    for parameter, moment in zip(parameters, some_tensors(device, 1), strict=True):
        optimizer.state[parameter] = {"step": shared, "exp_avg": moment, "exp_avg_sq": moment.square()}
    for group in optimizer.param_groups:
        group["fused"] = not fused  # as a checkpoint of another device would have it
    if fused:
        take_steps_at_once(optimizer)
    else:
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = None, False
        for state in optimizer.state.values():
            state["step"] = torch.tensor(3.0)
    for parameter, gradient in zip(parameters, some_tensors(device, 2), strict=True):
        parameter.grad = gradient
    for _ in range(2):
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_loaded_adam_goes_on_as_fits_the_device(device: str) -> None:
    found, optimizer = stepped(device, fused=True)
    expected, _ = stepped(device, fused=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert [float(state["step"]) for state in optimizer.state.values()] == [5.0] * len(found)
    assert {state["step"].device.type for state in optimizer.state.values()} == {device}
    assert [group["fused"] for group in optimizer.param_groups] == [True if device == "cuda" else None]
