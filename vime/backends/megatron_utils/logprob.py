"""Log-probabilities, entropies and score-centering terms of response tokens, without a full matrix of logits.

Logits of a microbatch in float32 would take tokens x vocabulary x 4 bytes (10 GB for 16k tokens of a 152k
vocabulary). Here they exist for one block of rows and vocabulary entries at a time, in the forward pass and again in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vime.algorithms.importance import WeightRule
from vime.backends.megatron_utils.head.backward import logit_gradient, propagate
from vime.backends.megatron_utils.head.forward import HeadRequest, evaluate
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms, Nucleus, TopKCandidates


def response_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: HeadOptions,
    group: dist.ProcessGroup | None = None,
    *,
    with_entropy: bool = True,
    candidates: TopKCandidates | None = None,
    nucleus: Nucleus | None = None,
    rule: WeightRule | None = None,
) -> HeadTerms:
    """Terms of each row of softmax(hidden @ weight.T / temperature) that the losses need.

    With a `nucleus`, log-probabilities are those among its tokens (a target outside of it is added); rows without
    one, and all entropies, keep the whole vocabulary. With a `rule`, score-centering terms are computed too: over the
    `nucleus`, which then needs log-probabilities, or over the `candidates` with a modelled tail.

    Args:
        hidden: [R, H], equal on all ranks of `group`.
        weight: [V / group size, H], this rank's rows of the output head.
        targets: [R] int64 token ids over the whole vocabulary.
        group: ranks that share the vocabulary; None for one.

    The gradient of `hidden` holds only this rank's part of the vocabulary; the caller sums it over `group`.
    Raises `ModelError` for ids outside of the vocabulary and offsets that don't fit, `ValueError` for a `rule`
    without exactly one of `candidates` and a `nucleus` with log-probabilities.
    """
    if candidates is not None and nucleus is not None:
        raise ValueError("score centering takes candidates or a nucleus, got both")
    if rule is not None and candidates is None and (nucleus is None or nucleus.log_probs is None):
        raise ValueError("score centering needs candidates, or a nucleus with log-probabilities")
    request = HeadRequest(
        targets, options, group, with_entropy, candidates if rule is not None else None, nucleus, rule
    )
    apply: Callable[..., tuple[Any, ...]] = _BlockwiseHead.apply
    return HeadTerms(*apply(hidden, weight, request))


class _BlockwiseHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, request: HeadRequest
    ) -> tuple[torch.Tensor | None, ...]:
        found = evaluate(hidden, weight, request)
        ctx.save_for_backward(hidden, weight)
        ctx.found, ctx.options = found, request.options
        ctx.set_materialize_grads(False)
        entropy = None if found.entropy is None else found.entropy.clone()
        if found.centering is None:
            return found.log_prob.values.float(), entropy, None, None, None
        masses = found.centering.train_mass.float(), found.centering.sampler_mass.float()
        ctx.mark_non_differentiable(*masses)
        return found.log_prob.values.float(), entropy, found.centering.correction.values.float(), *masses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        gradient = logit_gradient(ctx.found, ctx.options, *grads[:3])
        to_hidden, to_weight, _ = ctx.needs_input_grad
        return *propagate(
            hidden, weight, ctx.found, ctx.options, gradient, to_hidden=to_hidden, to_weight=to_weight
        ), None
