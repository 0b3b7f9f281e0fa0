"""The head's terms, written from the formulas: full logits, float64, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms, Nucleus, TopKCandidates

Weighting = Callable[[float], float]


def no_weight(ratio: float) -> float:  # noqa: ARG001
    return 1.0


def truncated(ratio: float) -> float:
    return min(max(ratio, 0.5), 1.3)


def truncated_below_one(ratio: float) -> float:
    return min(max(ratio, 0.2), 0.8)


def band_pass(ratio: float) -> float:
    return ratio if 0.4 <= ratio <= 2.5 else 0.0


@dataclass(frozen=True)
class HeadCase:
    """Inputs of the head, of R rows."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    candidates: TopKCandidates | None = None
    nucleus: Nucleus | None = None

    def fresh(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and weights as leaves of a graph."""
        hidden, weight = (tensor.detach().to(dtype).clone().requires_grad_() for tensor in (self.hidden, self.weight))
        return hidden, weight


def make_case(kind: str, *, rows: int = 13, vocab: int = 41, seed: int = 0, spread: float = 1.0) -> HeadCase:
    """`kind` is plain, top_k or nucleus; the sampler is the trainer with noise, so that ratios lie on both sides of 1.

    Some rows of a nucleus are empty, some hold one token, and some lack the target.
    """
    chance = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 16, generator=chance)
    weight = torch.randn(vocab, 16, generator=chance) * 0.4 * spread
    targets = torch.randint(vocab, (rows,), generator=chance)
    noisy = hidden @ weight.t() + 0.5 * torch.randn(rows, vocab, generator=chance)
    if kind == "top_k":
        top = noisy.log_softmax(-1).topk(6)
        return HeadCase(hidden, weight, targets, candidates=TopKCandidates(top.indices.int(), top.values))
    if kind == "plain":
        return HeadCase(hidden, weight, targets)
    lengths = [(5, 0, 1, 9, 3)[row % 5] for row in range(rows)]
    ids, log_probs = [], []
    for row, length in enumerate(lengths):
        order = noisy[row].argsort(descending=True)[: 3 * length : 3]
        if length and row % 2 == 0 and targets[row] not in order:
            order[-1] = targets[row]
        ids.append(order.int())
        log_probs.append(noisy[row][order].log_softmax(-1))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return HeadCase(hidden, weight, targets, nucleus=Nucleus(torch.cat(ids), offsets, torch.cat(log_probs)))


def dense_terms(
    case: HeadCase, hidden: torch.Tensor, weight: torch.Tensor, options: HeadOptions, f: Weighting | None
) -> HeadTerms:
    """What `response_log_probs` should return, as float64 tensors in a graph."""
    logits = hidden @ weight[: options.vocab_size].t() / options.temperature
    all_log_p = logits.log_softmax(-1)
    log_probs, corrections, train_mass, sampler_mass = [], [], [], []
    for row, (log_p, target) in enumerate(zip(all_log_p, case.targets.tolist(), strict=True)):
        kept, log_q = _recorded(case, row)
        log_probs.append(_replayed(log_p, target, kept) if case.nucleus is not None else log_p[target])
        train_mass.append(math.fsum(log_p[kept].exp().tolist()))
        sampler_mass.append(math.fsum(math.exp(value) for value in log_q))
        if f is None:
            continue
        if case.nucleus is not None:
            corrections.append(_exact_correction(log_p[kept].log_softmax(0), log_q, f))
        else:
            corrections.append(_modelled_correction(log_p, kept, log_q, f))
    entropy = -(all_log_p.exp() * all_log_p).sum(-1)
    if f is None:
        return HeadTerms(torch.stack(log_probs), entropy)
    masses = torch.tensor(train_mass, dtype=torch.float64), torch.tensor(sampler_mass, dtype=torch.float64)
    return HeadTerms(torch.stack(log_probs), entropy, torch.stack(corrections), *masses)


def _recorded(case: HeadCase, row: int) -> tuple[list[int], list[float]]:
    if case.candidates is not None:
        return case.candidates.ids[row].tolist(), case.candidates.log_probs[row].tolist()
    if case.nucleus is None or case.nucleus.log_probs is None:
        return [], []
    begin, end = case.nucleus.offsets[row : row + 2].tolist()
    return case.nucleus.ids[begin:end].tolist(), case.nucleus.log_probs[begin:end].tolist()


def _replayed(log_p: torch.Tensor, target: int, kept: list[int]) -> torch.Tensor:
    if not kept:
        return log_p[target]
    return log_p[target] - log_p[sorted({*kept, target})].logsumexp(0)


def _exact_correction(log_p: torch.Tensor, log_q: list[float], f: Weighting) -> torch.Tensor:
    correction = log_p.new_zeros(())
    for value, log_sampler in zip(log_p, log_q, strict=True):
        p, q = math.exp(value.item()), math.exp(log_sampler)
        correction = correction + (q * f(p / q) - f(1.0) * p) * value
    return correction


def _modelled_correction(log_p: torch.Tensor, kept: list[int], log_q: list[float], f: Weighting) -> torch.Tensor:
    tail = [index for index in range(len(log_p)) if index not in kept]
    train_tail = max(math.fsum(log_p[tail].exp().tolist()), 1e-6)
    rho = max(1.0 - math.fsum(math.exp(value) for value in log_q), 1e-6) / train_tail
    alpha = rho * f(1.0 / rho)
    correction = log_p.new_zeros(())
    for index, log_sampler in zip(kept, log_q, strict=True):
        p, q = math.exp(log_p[index].item()), math.exp(log_sampler)
        correction = correction + (q * f(p / q) - alpha * p) * log_p[index]
    return correction
