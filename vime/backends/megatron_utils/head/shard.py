"""This rank's part of the vocabulary, and sums over the ranks that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vime.errors import ModelError


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary ids `start` to `start + size` without padding; `group` shares the vocabulary, None for one rank."""

    start: int
    size: int
    group: dist.ProcessGroup | None

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(columns of this shard, whether each id lies in it); the columns of other ids mean nothing."""
        columns = ids.long() - self.start
        return columns, (columns >= 0) & (columns < self.size)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over the group, in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


def shard_of(weight: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> VocabShard:
    """The shard that a head weight [V / group size, H] holds; raises `ModelError` when it is nothing but padding."""
    start = weight.size(0) * (0 if group is None else group.rank())
    size = min(weight.size(0), vocab_size - start)
    if size < 1:
        raise ModelError(
            f"the output head of this rank starts at id {start}, but the vocabulary has {vocab_size} entries.",
            next_step="Lower --tensor-model-parallel-size or --make-vocab-size-divisible-by.",
        )
    return VocabShard(start, size, group)


def check_ids(what: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ModelError`, naming the first one and its place, when an id lies outside of the vocabulary."""
    wrong = (ids < 0) | (ids >= vocab_size)
    if not bool(wrong.any()):
        return
    place = tuple(int(index) for index in wrong.nonzero()[0])
    raise ModelError(
        f"{what} {int(ids[place])} at {list(place)} is outside of the vocabulary, allowed: 0 to {vocab_size - 1}.",
        next_step="Check that trainer and engines use the same tokenizer and vocabulary size.",
    )
