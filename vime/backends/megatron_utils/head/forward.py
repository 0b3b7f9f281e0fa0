"""The forward pass of the head: statistics of each row, and the logits of the few entries that are needed singly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vime.algorithms.importance import WeightRule
from vime.backends.megatron_utils.fused.rule import has_kernels
from vime.backends.megatron_utils.head import nucleus as nuclei
from vime.backends.megatron_utils.head.grid import Grid, GridEntries
from vime.backends.megatron_utils.head.projection import projection_of
from vime.backends.megatron_utils.head.scores import Centering, Score, log_prob_score
from vime.backends.megatron_utils.head.shard import VocabShard, check_ids, shard_of
from vime.backends.megatron_utils.head.softmax import EXCLUDED, OnlineSoftmax
from vime.backends.megatron_utils.head.top_k import center_top_k
from vime.backends.megatron_utils.head.types import HeadOptions, Nucleus, TopKCandidates


@dataclass(frozen=True)
class HeadRequest:
    """Everything but hidden states and weights; see `response_log_probs`."""

    targets: torch.Tensor
    options: HeadOptions
    group: dist.ProcessGroup | None
    with_entropy: bool
    candidates: TopKCandidates | None
    nucleus: Nucleus | None
    rule: WeightRule | None


@dataclass(frozen=True)
class RecordedEntries:
    """The target of each row and the N recorded tokens (candidates or nucleus), as entries of the logits."""

    rows: torch.Tensor
    """[R + N] int64"""
    ids: torch.Tensor
    """[R + N] int64; the first R are the targets"""
    segments: nuclei.Segments | None
    """The rows of a nucleus."""
    are_targets: bool = False
    """Whether nothing is recorded but the targets."""


@dataclass(frozen=True)
class Evaluation:
    """What the forward pass found; all that the backward pass needs beside hidden states and weights."""

    shard: VocabShard
    entries: RecordedEntries
    maximum: torch.Tensor
    """[R] float32, greatest logit"""
    total: torch.Tensor
    """[R] float32, sum of exponentials of logits minus `maximum`"""
    log_prob: Score
    entropy: torch.Tensor | None
    """[R] float32"""
    centering: Centering | None


def evaluate(hidden: torch.Tensor, weight: torch.Tensor, request: HeadRequest) -> Evaluation:
    """Run the forward pass; raises `ModelError` for ids outside of the vocabulary and offsets that don't fit."""
    shard = shard_of(weight, request.options.vocab_size, request.group)
    entries = _entries(request, hidden.size(0))
    softmax, logits = _sweep(hidden, weight, request, shard, entries)
    num_rows = hidden.size(0)
    target_logits, recorded = logits[:num_rows], logits[num_rows:]
    if request.candidates is not None and request.rule is not None:
        centering: Centering | None = _center_candidates(softmax, recorded, request.candidates, request.rule)
        log_prob = log_prob_score(target_logits, softmax.log_total())
    elif request.nucleus is not None and entries.segments is not None:
        log_prob, centering = _within_nucleus(
            target_logits, recorded, softmax.log_total(), request, request.nucleus, entries.segments
        )
    else:
        log_prob, centering = log_prob_score(target_logits, softmax.log_total()), None
    return Evaluation(shard, entries, softmax.maximum, softmax.total, log_prob, softmax.entropy(), centering)


def _center_candidates(
    softmax: OnlineSoftmax, logits: torch.Tensor, candidates: TopKCandidates, rule: WeightRule
) -> Centering:
    """Adds the candidates, which the sweep left out, to `softmax`."""
    logits = logits.view_as(candidates.ids)
    log_tail = softmax.log_total()
    softmax.update(slice(None), logits.float())
    return center_top_k(logits, softmax.log_total(), log_tail, candidates, rule)


def _within_nucleus(
    target_logits: torch.Tensor,
    logits: torch.Tensor,
    log_total: torch.Tensor,
    request: HeadRequest,
    nucleus: Nucleus,
    segments: nuclei.Segments,
) -> tuple[Score, Centering | None]:
    log_prob = nuclei.replay_log_prob(target_logits, logits, log_total, request.targets, nucleus, segments)
    if request.rule is None or nucleus.log_probs is None:
        return log_prob, None
    return log_prob, nuclei.center_nucleus(logits, log_total, nucleus.log_probs, segments, request.rule)


def _entries(request: HeadRequest, num_rows: int) -> RecordedEntries:
    vocab_size = request.options.vocab_size
    targets = request.targets.long()
    check_ids("target id", targets, vocab_size)
    rows = torch.arange(num_rows, device=targets.device)
    if request.candidates is not None:
        ids = request.candidates.ids.long()
        check_ids("candidate id", ids, vocab_size)
        all_rows = torch.cat([rows, rows.repeat_interleave(ids.size(1))])
        return RecordedEntries(all_rows, torch.cat([targets, ids.flatten()]), None)
    if request.nucleus is not None:
        ids = request.nucleus.ids.long()
        check_ids("nucleus id", ids, vocab_size)
        segments = nuclei.segments_of(request.nucleus, num_rows)
        return RecordedEntries(torch.cat([rows, segments.rows]), torch.cat([targets, ids]), segments)
    return RecordedEntries(rows, targets, None, are_targets=True)


def _sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    request: HeadRequest,
    shard: VocabShard,
    entries: RecordedEntries,
) -> tuple[OnlineSoftmax, torch.Tensor]:
    """Softmax statistics over the vocabulary without the candidates, and the logits of all entries, float64."""
    options = request.options
    grid = Grid(hidden.size(0), shard.size, options.chunk_rows, options.tile_columns)
    columns, inside = shard.local(entries.ids)
    projection = projection_of(hidden, weight, fp32=options.fp32)
    softmax = OnlineSoftmax(hidden.size(0), hidden.device, with_entropy=request.with_entropy)
    picked = torch.zeros(len(entries.ids), device=hidden.device)
    if entries.are_targets and has_kernels(hidden):
        for _, tile_columns in grid.tiles():
            for _, rows in grid.chunks():
                logits = projection.logits(rows, weight[tile_columns], options.temperature)
                softmax.update_fused(rows, logits, columns[rows] - tile_columns.start, picked[rows])
        softmax.reduce(shard)
        return softmax, shard.sum(picked).double()
    grid_entries = GridEntries(grid, entries.rows, columns, inside)
    for tile, tile_columns in grid.tiles():
        for chunk, rows in grid.chunks():
            logits = projection.logits(rows, weight[tile_columns], options.temperature)
            numbers, places = grid_entries.of_block(tile, chunk)
            flat = logits.view(-1)
            picked[numbers] = flat[places]
            if request.candidates is not None:
                flat[places[numbers >= len(request.targets)]] = EXCLUDED
            softmax.update(rows, logits)
    softmax.reduce(shard)
    return softmax, shard.sum(picked).double()
