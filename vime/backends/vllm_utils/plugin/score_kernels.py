"""Log-probabilities of sampled tokens and the most probable ones on a GPU, from one pass over the logits.

A pass over the logits of 256 requests and 151,936 tokens takes as long as a layer of a small model, so there is one. It
takes what log-softmax and the token's rank need, and the largest logit of every group of neighbouring tokens. The k
largest logits lie in the k groups whose largest logits are the largest, so only those groups are searched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SPAN = 8192
"""Columns that one program reads."""
_GROUP = 32
_MOST_CANDIDATES = 128
"""For more the search is compiled for longer than it pays."""
_FEWEST_GROUPS = 4
"""Groups in multiples of k; where there are fewer, most of the logits would be searched."""


def can_score(logits: torch.Tensor, k: int) -> bool:
    """Whether `score` takes these logits and is of use."""
    is_small = k <= _MOST_CANDIDATES and k * _GROUP * _FEWEST_GROUPS <= logits.shape[1]
    return is_small and logits.stride(1) == 1


def score(logits: torch.Tensor, k: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Of logits [n, V] and token ids [n]: one int32 [n * (2 k + 3)], whose parts `views` tells.

    Few launches and one array, because the process that launches is what an engine of a small model waits for.
    """
    num_rows, vocab_size = logits.shape
    num_spans, num_groups = -(-vocab_size // _SPAN), -(-vocab_size // _GROUP)
    sums = torch.empty((3, num_rows, num_spans), dtype=torch.float32, device=logits.device)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device) if k else sums
    _scan_kernel[(num_rows, num_spans)](
        logits, logits.stride(0), token_ids, sums, maxima, vocab_size, num_groups,
        SPAN=_SPAN, GROUP=_GROUP, HAS_GROUPS=k > 0, num_warps=8,
    )  # fmt: skip
    groups = torch.topk(maxima, k, dim=-1, sorted=False).indices if k else token_ids
    found = torch.empty(num_rows * (2 * k + 3), dtype=torch.int32, device=logits.device)
    _finish_kernel[(num_rows,)](
        logits, logits.stride(0), token_ids, sums, groups, found, vocab_size, num_spans, k,
        SPANS=triton.next_power_of_2(num_spans), K=_places(k), GROUP=_GROUP,
        num_warps=8 if k else 1,
    )  # fmt: skip
    return found


def _places(k: int) -> int:
    """Triton's search for the largest takes powers of two, in some versions from 2 on."""
    return max(2, int(triton.next_power_of_2(k))) if k else 0


def views(found: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of what `score` returns, ids int32 [n, k + 1], log-probabilities float32 [n, k + 1] and ranks int32 [n].

    Both of the token, then of the k most probable ones, most probable first; of equal ones lower ids come first. The
    ids of a row lie before its log-probabilities. A rank is how many tokens are as probable as the token, itself
    included.
    """
    width = k + 1
    num_rows = found.shape[0] // (2 * width + 1)
    shape, strides = (num_rows, width), (2 * width, 1)
    log_probs = found.view(torch.float32).as_strided(shape, strides, width)
    return found.as_strided(shape, strides, 0), log_probs, found[2 * width * num_rows :]


@triton.jit
def _scan_kernel(
    logits, stride, token_ids, sums, maxima, vocab_size, num_groups,
    SPAN: tl.constexpr, GROUP: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """Of each row and span, `sums` [3, n, spans]: its largest logit, the sum of exponentials over that, and how many
    reach the token's logit."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = span * SPAN + tl.arange(0, SPAN)
    is_there = columns < vocab_size
    found = tl.load(logits + row * stride + columns, mask=is_there, other=float("-inf")).to(tl.float32)
    token = tl.load(token_ids + row)
    is_known = (token >= 0) & (token < vocab_size)
    own = tl.load(logits + row * stride + token, mask=is_known, other=float("nan")).to(tl.float32)
    top = tl.max(found, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)  # a span of tokens that top-p left out
    at, plane = row * tl.num_programs(1) + span, tl.num_programs(0) * tl.num_programs(1)
    tl.store(sums + at, top)
    tl.store(sums + plane + at, tl.sum(tl.exp(found - shift), axis=0))
    tl.store(sums + 2 * plane + at, tl.sum((is_there & (found >= own)).to(tl.float32), axis=0))
    if HAS_GROUPS:
        groups = span * (SPAN // GROUP) + tl.arange(0, SPAN // GROUP)
        largest = tl.max(tl.reshape(found, [SPAN // GROUP, GROUP]), axis=1)
        tl.store(maxima + row * num_groups + groups, largest, mask=groups < num_groups)


@triton.jit
def _finish_kernel(
    logits, stride, token_ids, sums, groups, found, vocab_size, num_spans,
    k, SPANS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Puts the spans of a row together, sorts the logits of its k groups, and writes its scores."""
    row, num_rows, spans = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, SPANS)
    at, plane, is_span = row * num_spans + spans, num_rows * num_spans, spans < num_spans
    tops = tl.load(sums + at, mask=is_span, other=float("-inf"))
    top = tl.max(tops, axis=0)
    parts = tl.load(sums + plane + at, mask=is_span, other=0.0)
    log_total = tl.log(tl.sum(parts * tl.exp(tops - top), axis=0))
    rank = tl.sum(tl.load(sums + 2 * plane + at, mask=is_span, other=0.0), axis=0)
    token = tl.load(token_ids + row)
    is_known = (token >= 0) & (token < vocab_size)
    own = tl.load(logits + row * stride + token, mask=is_known, other=float("nan")).to(tl.float32)
    width = k + 1
    ids = found + row * 2 * width
    tl.store(ids, token.to(tl.int32))
    tl.store(ids + width, (own - top - log_total).to(tl.int32, bitcast=True))
    tl.store(found + num_rows * 2 * width + row, rank.to(tl.int32))
    if K > 0:
        places = tl.arange(0, K * GROUP)
        is_place = places < k * GROUP
        columns = tl.load(groups + row * k + places // GROUP, mask=is_place, other=0) * GROUP + places % GROUP
        is_token = is_place & (columns < vocab_size)
        candidates = tl.load(logits + row * stride + columns, mask=is_token, other=0.0).to(tl.float32)
        bits = candidates.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
        keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
        best = tl.topk(tl.where(is_token, keys, -0x7FFFFFFFFFFFFFFF), K)
        ordered = (best >> 32).to(tl.int32)
        values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        head = tl.arange(0, K)
        tl.store(ids + 1 + head, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32), mask=head < k)
        tl.store(ids + width + 1 + head, (values - top - log_total).to(tl.int32, bitcast=True), mask=head < k)
