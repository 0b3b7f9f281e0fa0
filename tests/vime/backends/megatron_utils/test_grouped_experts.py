"""Grouped products of experts against one expert after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from vime.backends.megatron_utils.shim import prepare_megatron

prepare_megatron()

from vime.backends.megatron_utils.grouped_experts import ExpertWeights, are_plain, grouped_experts  # noqa: E402

COUNTS = (5, 0, 11, 1)
HIDDEN, INNER = 16, 24
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def one_after_the_other(
    hidden: torch.Tensor, scales: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]
) -> torch.Tensor:
    outputs, start = [], 0
    for number, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        inner = hidden[rows] @ first[number].t()
        outputs.append((F.silu(inner[:, :INNER]) * inner[:, INNER:] * scales[rows, None]) @ second[number].t())
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_outputs_and_gradients_equal_those_of_one_expert_after_the_other(device: str) -> None:
    chance = torch.Generator().manual_seed(0)
    shapes = [(sum(COUNTS), HIDDEN), *[(2 * INNER, HIDDEN)] * len(COUNTS), *[(HIDDEN, INNER)] * len(COUNTS)]
    leaves = [(torch.randn(shape, generator=chance) * 0.3).bfloat16().to(device) for shape in shapes]
    scales = torch.rand(sum(COUNTS), generator=chance).to(device)
    wanted = torch.randn(sum(COUNTS), HIDDEN, generator=chance).to(device)

    narrow = [leaf.clone().requires_grad_() for leaf in leaves]
    weights = ExpertWeights(narrow[1 : 1 + len(COUNTS)], narrow[1 + len(COUNTS) :])
    found = grouped_experts(narrow[0], torch.tensor(COUNTS), scales, weights, F.silu)
    found.backward(wanted.bfloat16())

    wide = [leaf.double().requires_grad_() for leaf in leaves]
    expected = one_after_the_other(wide[0], scales.double(), wide[1 : 1 + len(COUNTS)], wide[1 + len(COUNTS) :])
    expected.backward(wanted.bfloat16().double())

    pairs = [(found, expected), *[(a.grad, b.grad) for a, b in zip(narrow, wide, strict=True)]]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one.double() - other).abs().max() <= 0.02 * max(1.0, float(other.abs().max()))


PLAIN = {
    "gated_linear_unit": True, "add_bias_linear": False, "moe_apply_probs_on_input": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "fp8": None, "fp4": None,
    "hidden_size": 64, "moe_ffn_hidden_size": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    "unusual",
    [{"gated_linear_unit": False}, {"add_bias_linear": True}, {"fp8": "e4m3"}, {"hidden_size": 60},
     {"moe_ffn_hidden_size": 28}, {"glu_linear_offset": 1.0}, {"activation_func_clamp_value": 7.0}],
)  # fmt: skip
def test_experts_of_another_kind_or_of_odd_sizes_are_multiplied_one_after_the_other(unusual: dict[str, object]) -> None:
    assert are_plain(SimpleNamespace(**PLAIN))
    assert not are_plain(SimpleNamespace(**{**PLAIN, **unusual}))
