"""Repair for speculative decoding on a CPU.

Temperature, top-k and top-p of a request hold for each token that is drafted for it. vLLM 0.32's kernel for CPUs that
repeats them writes 64-bit integers, for any other dtype into a copy that nobody reads: drafts are then verified with
whatever the memory held, without an error. Plain tensor operations repeat them here.
"""

from __future__ import annotations

import torch


def install() -> None:
    """Extend vLLM's module in this process, on a CPU; may be called more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Numbers [T] of tokens from those of their requests, `x` [B], in its dtype; signature and names are vLLM's.

    `cu_num_tokens` [B] are the sums of the requests' numbers of tokens, up to each, and `num_tokens` is T. A number
    that is `replace_from` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
