"""Log-probabilities and entropies against dense float64, and that no full matrix of logits is made."""

from __future__ import annotations

import math

import pytest
import torch

from vime.backends.megatron_utils import logprob
from vime.backends.megatron_utils.logprob import HeadOptions, response_log_probs
from vime.errors import ModelError


def inputs(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, targets


def test_hand_computed_softmax_of_five_tokens() -> None:
    # logits / temperature = [0, 1, 2, 3, 4] / 2; sum of exponentials = 1 + 1.648721 + 2.718282 + 4.481689 + 7.389056.
    hidden, weight = torch.tensor([[1.0]]), torch.arange(5.0)[:, None]
    log_probs, entropies = response_log_probs(hidden, weight, torch.tensor([3]), HeadOptions(5, temperature=2.0))
    assert log_probs.item() == pytest.approx(1.5 - math.log(17.237748), abs=1e-6)
    probabilities = [math.exp(index / 2) / 17.237748 for index in range(5)]
    assert entropies.item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-6)


@pytest.mark.parametrize("chunk_rows", [1, 4, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_dense_float64(temperature: float, chunk_rows: int) -> None:
    hidden, weight, targets = inputs(11, 37)
    factors = torch.linspace(-1, 2, 11)
    options = HeadOptions(37, temperature, chunk_rows=chunk_rows)
    log_probs, entropies = response_log_probs(hidden, weight, targets, options)
    ((log_probs * factors).sum() + 0.3 * (entropies * factors.flip(0)).sum()).backward()

    dense_hidden, dense_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = (dense_hidden @ dense_weight.t() / temperature).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((expected * factors).sum() + 0.3 * (entropy * factors.flip(0)).sum()).backward()

    for found, reference in [
        (log_probs, expected),
        (entropies, entropy),
        (hidden.grad, dense_hidden.grad),
        (weight.grad, dense_weight.grad),
    ]:
        assert found is not None
        assert reference is not None
        torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=2e-6)


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient() -> None:
    hidden, weight, targets = inputs(6, 30)
    padded = torch.cat([weight.detach(), torch.full((2, 16), 5.0)]).requires_grad_()
    plain, _ = response_log_probs(hidden, weight, targets, HeadOptions(30))
    found, _ = response_log_probs(hidden, padded, targets, HeadOptions(30))
    found.sum().backward()
    assert torch.equal(plain, found)
    assert padded.grad is not None
    assert padded.grad[30:].abs().max() == 0


def test_head_of_nothing_but_padding_is_refused() -> None:
    hidden, weight, targets = inputs(2, 30)
    with pytest.raises(ModelError, match="vocabulary has 0 entries"):
        response_log_probs(hidden, weight, targets, HeadOptions(0))


def test_bf16_weights_are_multiplied_in_float32() -> None:
    hidden, weight, targets = inputs(64, 40, torch.bfloat16)
    dense = (hidden.detach().double() @ weight.detach().double().t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    exact, _ = response_log_probs(hidden, weight, targets, HeadOptions(40))
    rough, _ = response_log_probs(hidden, weight, targets, HeadOptions(40, fp32=False))
    exact.sum().backward()
    assert (exact - dense).abs().max() < 1e-4
    assert (rough - dense).abs().max() > 1e-3
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_logits_exist_only_for_a_chunk_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = logprob._logits

    def counted(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
        seen.append(hidden.size(0))
        return original(hidden, weight, temperature)

    monkeypatch.setattr(logprob, "_logits", counted)
    hidden, weight, targets = inputs(50, 20)
    response_log_probs(hidden, weight, targets, HeadOptions(20, chunk_rows=8))[0].sum().backward()
    assert max(seen) == 8
    assert sum(seen) == 100, "every row once forward and once backward"


def test_no_rows_give_no_values_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(0, 20)
    log_probs, entropies = response_log_probs(hidden, weight, targets, HeadOptions(20))
    (log_probs.sum() + entropies.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0
