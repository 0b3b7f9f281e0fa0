"""The microbatches of one optimizer step: which samples share one, and which rank gets it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.balance import require_one_each, share_out
from pipeline.bins import best_fit, load, raise_count
from vime.errors import TrainerError

Microbatches = list[list[list[int]]]
"""For each rank its microbatches, each a list of sample numbers."""


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """How the samples of a step become microbatches."""

    num_ranks: int
    """Data-parallel size."""
    max_tokens: int | None = None
    """Token limit of a microbatch; None: `micro_batch_size` samples each."""
    micro_batch_size: int = 1
    balance: bool = False
    """Give every rank as much work. Otherwise microbatches are dealt in turn."""
    linear_work: float | None = None
    """The work of a sequence of L tokens is L * (linear_work + L); None: L alone."""
    count_multiple: int = 1
    """Every rank's number of microbatches is a multiple of this (the group of an interleaved pipeline)."""
    length_multiple: int = 1
    """Sequences are padded to a multiple of this (the chunks of context parallelism)."""

    def length(self, num_tokens: int) -> int:
        """Tokens that a sequence takes in a microbatch."""
        return -(-num_tokens // self.length_multiple) * self.length_multiple

    def work(self, length: int) -> float:
        return float(length) if self.linear_work is None else length * (self.linear_work + length)


def pack_step(num_tokens: Mapping[int, int], settings: PackingSettings) -> Microbatches:
    """Microbatches of every rank, the largest first, for samples given as number -> tokens.

    Every sample is in one microbatch; all ranks get as many microbatches, some of which may be empty where there are
    too few samples. The result depends on nothing but the arguments.

    Raises:
        TrainerError: a sample is longer than `max_tokens`.
        ValueError: fewer samples than ranks.
    """
    require_one_each(len(num_tokens), settings.num_ranks)
    lengths = {number: settings.length(num_tokens[number]) for number in sorted(num_tokens)}
    if settings.max_tokens is None:
        ranks = _fixed_size(lengths, settings)
    else:
        _refuse_longer(lengths, settings.max_tokens)
        ranks = _up_to_tokens(lengths, settings, settings.max_tokens)
    for microbatches in ranks:
        microbatches.sort(key=lambda members: (-load(members, lengths), members))
    return ranks


def _up_to_tokens(lengths: Mapping[int, int], settings: PackingSettings, max_tokens: int) -> Microbatches:
    if not settings.balance:
        bins = best_fit(lengths, lengths, max_tokens)
        bins = raise_count(bins, lengths, _rounded_up(len(bins), settings.num_ranks * settings.count_multiple))
        bins.sort(key=lambda members: -load(members, lengths))
        return [bins[rank :: settings.num_ranks] for rank in range(settings.num_ranks)]
    work = {number: settings.work(length) for number, length in lengths.items()}
    packed = [best_fit(members, lengths, max_tokens) for members in share_out(work, settings.num_ranks)]
    count = _rounded_up(max(map(len, packed)), settings.count_multiple)
    return [raise_count(bins, lengths, count) for bins in packed]


def _fixed_size(lengths: Mapping[int, int], settings: PackingSettings) -> Microbatches:
    """`micro_batch_size` samples each; some fewer, or none, where they don't come out even."""
    num_ranks, size = settings.num_ranks, settings.micro_batch_size
    per_rank = _rounded_up(-(-len(lengths) // (size * num_ranks)), settings.count_multiple)
    if not settings.balance:
        microbatches = _cut(list(lengths), per_rank * num_ranks)
        if not all(microbatches[:num_ranks]):  # so few samples that some rank would get none
            microbatches.sort(key=len, reverse=True)
        return [microbatches[rank::num_ranks] for rank in range(num_ranks)]
    work = {number: settings.work(length) for number, length in lengths.items()}
    shares = share_out(work, num_ranks, most=per_rank * size)
    return [[members[i::per_rank] for i in range(per_rank)] for members in shares]


def _cut(numbers: Sequence[int], count: int) -> list[list[int]]:
    """`count` runs of `numbers` whose sizes differ by one at most."""
    edges = [i * len(numbers) // count for i in range(count + 1)]
    return [list(numbers[a:b]) for a, b in itertools.pairwise(edges)]


def _rounded_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def _refuse_longer(lengths: Mapping[int, int], max_tokens: int) -> None:
    longest = max(lengths, key=lambda number: lengths[number])
    if lengths[longest] > max_tokens:
        raise TrainerError(
            f"sample {longest} of the batch takes {lengths[longest]} tokens, a microbatch may have {max_tokens} "
            "(--max-tokens-per-gpu x context parallel size); a sequence is never split.",
            next_step="Raise --max-tokens-per-gpu, or lower --rollout-max-response-len for new samples, and resume.",
        )
