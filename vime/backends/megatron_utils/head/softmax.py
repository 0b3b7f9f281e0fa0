"""Softmax statistics of rows that are seen a block at a time."""

from __future__ import annotations

import torch

from vime.backends.megatron_utils.fused.rule import has_kernels
from vime.backends.megatron_utils.head.shard import VocabShard

EXCLUDED = -1e30
"""Logit of an entry that counts for nothing. Finite, so that 0 times it is 0."""
_LOWEST = -1e29
"""Maximum of no entries: above `EXCLUDED`, so that its exponential is 0, and below every real logit."""


class OnlineSoftmax:
    """Maximum m, sum of exp(x - m) and, for the entropy, sum of exp(x - m) (x - m) of each row's logits x."""

    def __init__(self, num_rows: int, device: torch.device, *, with_entropy: bool) -> None:
        self.maximum = torch.full((num_rows,), _LOWEST, device=device)
        self.total = torch.zeros(num_rows, device=device)
        self.weighted = torch.zeros(num_rows, device=device) if with_entropy else None

    def update(self, rows: slice, logits: torch.Tensor) -> None:
        """Take in more logits [r, columns] float32 of some rows; overwrites them."""
        if logits.numel() == 0:
            return
        if has_kernels(logits):
            self.update_fused(rows, logits)
            return
        self._raise_maximum(rows, torch.maximum(self.maximum[rows], logits.amax(-1)))
        logits.sub_(self.maximum[rows, None])
        if self.weighted is None:
            self.total[rows] += logits.exp_().sum(-1)
            return
        exponentials = logits.exp()
        self.total[rows] += exponentials.sum(-1)
        self.weighted[rows] += exponentials.mul_(logits).sum(-1)

    def update_fused(
        self,
        rows: slice,
        logits: torch.Tensor,
        targets: torch.Tensor | None = None,
        picked: torch.Tensor | None = None,
    ) -> None:
        """As `update`, by one kernel, which leaves the logits as they are; see `fused.softmax.update_statistics`."""
        from vime.backends.megatron_utils.fused.softmax import update_statistics

        weighted = None if self.weighted is None else self.weighted[rows]
        update_statistics(logits, self.maximum[rows], self.total[rows], weighted, targets=targets, picked=picked)

    def reduce(self, shard: VocabShard) -> None:
        """Merge with the other parts of the vocabulary."""
        self._raise_maximum(slice(None), shard.max(self.maximum.clone()))
        sums = [self.total] if self.weighted is None else [self.total, self.weighted]
        for mine, reduced in zip(sums, shard.sum(torch.stack(sums)), strict=True):
            mine.copy_(reduced)

    def log_total(self) -> torch.Tensor:
        """[R] float64: log of the sum of exponentials."""
        return self.maximum.double() + self.total.double().log()

    def entropy(self) -> torch.Tensor | None:
        """[R] float32, in nats."""
        return None if self.weighted is None else self.total.log() - self.weighted / self.total

    def _raise_maximum(self, rows: slice, maximum: torch.Tensor) -> None:
        change = self.maximum[rows] - maximum
        if self.weighted is not None:
            self.weighted[rows] += change * self.total[rows]
            self.weighted[rows] *= change.exp()
        self.total[rows] *= change.exp()
        self.maximum[rows] = maximum
