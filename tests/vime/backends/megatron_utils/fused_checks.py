"""Fused kernels against the same formulas in dense float64, gradients included, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vime.backends.megatron_utils.fused.gate import swiglu
from vime.backends.megatron_utils.fused.heads import HeadNorms, rotated_heads
from vime.backends.megatron_utils.fused.rotation import Rotation
from vime.backends.megatron_utils.fused.softmax import gradient_parts, gradients_in_place, parts_of, update_statistics
from vime.backends.megatron_utils.head.softmax import OnlineSoftmax

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}
EPS = 1e-6


def _random(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=chance).to(device, dtype) for shape in shapes]


def _assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    worst = float((found.detach().double() - expected.detach()).abs().max())
    assert worst <= tolerance * max(1.0, float(expected.detach().abs().max())), worst


def _compare(
    fused: Callable[..., Sequence[torch.Tensor]],
    dense: Callable[..., Sequence[torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    tolerance: float,
) -> None:
    """Values, and gradients of all leaves for random gradients of the values."""
    narrow = [leaf.clone().requires_grad_() for leaf in leaves]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    found, expected = fused(*narrow), dense(*wide)
    chance = torch.Generator().manual_seed(1)
    given = [torch.randn(value.shape, generator=chance).to(value) for value in found]
    torch.autograd.backward(list(found), given)
    torch.autograd.backward(list(expected), [each.double() for each in given])
    for one, other in zip([*found], [*expected], strict=True):
        _assert_near(one, other, tolerance)
    for leaf, dense_leaf in zip(narrow, wide, strict=True):
        assert leaf.grad is not None
        assert dense_leaf.grad is not None
        _assert_near(leaf.grad, dense_leaf.grad, tolerance)


def _dense_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values / (values.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def check_gate(device: str, dtype: torch.dtype) -> None:
    def dense(values: torch.Tensor, scales: torch.Tensor | None = None) -> list[torch.Tensor]:
        gate, linear = values.chunk(2, -1)
        gated = gate / (1 + (-gate).exp()) * linear
        return [gated if scales is None else gated * scales[:, None]]

    for size in (24, 1100):
        values, scales = _random(device, dtype, (9, 2 * size), (9,))
        for leaves in ([values], [values, scales]):
            _compare(lambda *given: [swiglu(*given)], dense, leaves, TOLERANCES[dtype])


def _dense_heads(
    mixed: torch.Tensor, *weights: torch.Tensor, angles: torch.Tensor, groups: int, size: int, interleaved: bool
) -> list[torch.Tensor]:
    """Head by head, and two numbers of it at a time, as the paper on rotary embeddings writes it."""
    heads = mixed.view(len(mixed), groups, -1, size)
    queries, keys, values = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]
    if weights:
        queries, keys = (_dense_norm(each, weight) for each, weight in zip((queries, keys), weights, strict=True))
    half = angles.size(1)

    def turned(each: torch.Tensor) -> torch.Tensor:
        numbers = list(each.unbind(-1))
        for number in range(half):
            cosine, sine = angles[:, number, None].cos(), angles[:, number, None].sin()
            first, second = (2 * number, 2 * number + 1) if interleaved else (number, number + half)
            one, other = numbers[first], numbers[second]
            numbers[first], numbers[second] = one * cosine - other * sine, one * sine + other * cosine
        return torch.stack(numbers, -1)

    return [turned(queries), turned(keys), values]


def check_heads(device: str, dtype: torch.dtype) -> None:
    tokens = 11
    shapes = [(2, 2, 16, 8), (1, 3, 24, 12), (3, 1, 16, 4), (9, 3, 8, 4)]  # the third rotates half of a head
    for (groups, queries, size, half), interleaved in itertools.product(shapes, (False, True)):
        mixed, *weights = _random(device, dtype, (tokens, groups * (queries + 2) * size), (size,), (size,))
        angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(0)).to(device) * 100
        rotation = Rotation(angles.cos(), angles.sin(), interleaved)
        sizes = {"groups": groups, "size": size}
        for leaves in ([mixed], [mixed, *weights]):
            fused = partial(_fused_heads, rotation=rotation, **sizes)
            dense = partial(_dense_heads, angles=angles.double(), interleaved=interleaved, **sizes)
            _compare(fused, dense, leaves, TOLERANCES[dtype])


def _fused_heads(mixed: torch.Tensor, *weights: torch.Tensor, rotation: Rotation, groups: int, size: int) -> Any:
    norms = HeadNorms(weights[0], weights[1], EPS) if weights else None
    return rotated_heads(mixed, rotation, groups=groups, size=size, norms=norms)


def check_statistics(device: str, _dtype: torch.dtype) -> None:
    """Blocks of columns one after the other, with and without entropies, and the logit of a target in either."""
    (logits,) = _random(device, torch.float32, (6, 5000))
    logits *= 10
    logits[:, 2100] = -1e30  # an entry that is left out
    targets = torch.tensor([0, 2099, 2101, 4999, 2500, 7], device=device)
    for with_entropy in (False, True):
        softmax = OnlineSoftmax(6, torch.device(device), with_entropy=with_entropy)
        picked = torch.zeros(6, device=device)
        for begin, end in ((0, 2101), (2101, 5000)):
            update_statistics(
                logits[:, begin:end].contiguous(),
                softmax.maximum,
                softmax.total,
                softmax.weighted,
                targets=targets - begin,
                picked=picked,
            )
        wide = logits.double()
        _assert_near(softmax.log_total(), wide.logsumexp(-1), 1e-6)
        assert torch.equal(picked, logits.gather(1, targets[:, None])[:, 0])
        if with_entropy:
            found = softmax.entropy()
            assert found is not None
            probabilities = wide.softmax(-1)
            _assert_near(found, -(probabilities * wide.log_softmax(-1)).nan_to_num().sum(-1), 1e-5)


def check_gradients(device: str, _dtype: torch.dtype) -> None:
    logits, factor, slope, at_target = _random(device, torch.float32, (6, 2500), (6,), (6,), (6,))
    targets = torch.tensor([0, 2499, 17, -5, 2500, 2048], device=device)  # two lie in other blocks
    maximum = logits.amax(-1)
    for given in (None, slope):
        wide = logits.double()
        slopes = torch.zeros_like(factor) if given is None else given
        expected = (wide - maximum[:, None]).exp() * (factor[:, None].double() - slopes[:, None] * wide)
        in_place = gradients_in_place(logits.clone(), maximum, factor, given)
        _assert_near(in_place, expected, 1e-6)
        _assert_parts_of(parts_of(in_place), in_place.double())
        parts = gradient_parts(logits, maximum, factor, given, targets, at_target)
        for row, target in enumerate(targets.tolist()):
            if 0 <= target < 2500:
                expected[row, target] += at_target[row]
        _assert_parts_of(parts, expected)


def _assert_parts_of(parts: torch.Tensor, expected: torch.Tensor) -> None:
    both = parts[: len(expected)].double() + parts[len(expected) :].double()
    assert ((both - expected).abs() <= 2**-15 * (expected.abs() + 1e-3)).all()


CHECKS: Mapping[str, Callable[[str, torch.dtype], None]] = {
    "gate": check_gate,
    "heads": check_heads,
    "statistics": check_statistics,
    "gradients": check_gradients,
}
"""By name; each takes a device and the dtype of what is given."""

if __name__ == "__main__":
    for name, check in CHECKS.items():
        for dtype in TOLERANCES:
            check("cpu", dtype)
            print(name, dtype)
