"""Log-probabilities and entropies of response tokens, without a full matrix of logits.

Logits of a microbatch in float32 would take tokens x vocabulary x 4 bytes (10 GB for 16k tokens of a 152k
vocabulary). Here they exist for one chunk of rows at a time, in the forward pass and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vime.errors import ModelError


@dataclass(frozen=True)
class HeadOptions:
    """How hidden states become log-probabilities."""

    vocab_size: int
    """Real vocabulary; rows of the head beyond it are padding and have no probability."""
    temperature: float = 1.0
    fp32: bool = True
    """Multiply in float32 even when hidden states and weights are narrower."""
    chunk_rows: int = 1024


def response_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: HeadOptions,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural-log probability of each target and the entropy of each row's distribution.

    Args:
        hidden: [R, H], equal on all ranks of `group`.
        weight: [V / group size, H], this rank's rows of the output head.
        targets: [R] int64 token ids over the whole vocabulary.
        group: ranks that share the vocabulary; None for one.

    Returns two float32 tensors [R]: log softmax(hidden @ weight.T / temperature) at the target, and the entropy in
    nats. The gradient of `hidden` holds only this rank's part of the vocabulary; the caller sums it over `group`.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _ChunkedHead.apply
    return apply(hidden, weight, targets, options, group)


def _local_rows(weight: torch.Tensor, options: HeadOptions, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(first vocabulary id of this rank, number of its real rows)."""
    start = weight.size(0) * (0 if group is None else group.rank())
    real = min(weight.size(0), options.vocab_size - start)
    if real < 1:
        raise ModelError(
            f"the output head of this rank starts at id {start}, but the vocabulary has {options.vocab_size} entries.",
            next_step="Lower --tensor-model-parallel-size or --make-vocab-size-divisible-by.",
        )
    return start, real


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[rows, V] float32, divided by the temperature."""
    logits = (hidden.to(weight.dtype) @ weight.t()).float()
    return logits if temperature == 1.0 else logits / temperature


def _sum_over(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        options: HeadOptions,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, real = _local_rows(weight, options, group)
        head = weight[:real].float() if options.fp32 else weight[:real]
        rows = hidden.size(0)
        log_probs, entropies, log_sums = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
        for begin in range(0, rows, options.chunk_rows):
            chunk = slice(begin, begin + options.chunk_rows)
            logits = _logits(hidden[chunk], head, options.temperature)
            top = logits.amax(-1)
            if group is not None and group.size() > 1:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shifted = logits - top[:, None]
            exponentials = shifted.exp()
            local = targets[chunk] - start
            mine = (local >= 0) & (local < real)
            picked = shifted.gather(1, local.clamp(0, real - 1)[:, None])[:, 0]
            sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), picked.where(mine, 0.0)])
            total, weighted, target_logit = _sum_over(sums, group)
            log_total = total.log()
            log_probs[chunk] = target_logit - log_total
            entropies[chunk] = log_total - weighted / total
            log_sums[chunk] = top + log_total
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropies)
        ctx.options, ctx.group = options, group
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropies = grads
        hidden, weight, targets, log_sums, entropies = ctx.saved_tensors
        options, group = ctx.options, ctx.group
        start, real = _local_rows(weight, options, group)
        head = weight[:real].float() if options.fp32 else weight[:real]
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        for begin in range(0, hidden.size(0), options.chunk_rows):
            chunk = slice(begin, begin + options.chunk_rows)
            rows = hidden[chunk].to(head.dtype)
            log_p = _logits(hidden[chunk], head, options.temperature) - log_sums[chunk, None]
            p = log_p.exp()
            grad = p * -grad_log_probs[chunk, None]
            if grad_entropies is not None:
                grad -= p * (log_p + entropies[chunk, None]) * grad_entropies[chunk, None]
            local = targets[chunk] - start
            mine = (local >= 0) & (local < real)
            at = torch.arange(local.numel(), device=local.device)[mine]
            grad[at, local[mine]] += grad_log_probs[chunk][mine]
            grad /= options.temperature
            narrow = grad.to(head.dtype)
            grad_hidden[chunk] = (narrow @ head).to(hidden.dtype)
            grad_head += narrow.t() @ rows
        grad_weight = torch.zeros_like(weight)
        grad_weight[:real] = grad_head
        return grad_hidden, grad_weight, None, None, None
