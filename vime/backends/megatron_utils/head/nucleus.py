"""Log-probabilities and score centering on the tokens among which the sampler chose (recorded top-p support)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vime.algorithms.importance import WeightRule
from vime.backends.megatron_utils.head.scores import Centering, Score
from vime.backends.megatron_utils.head.types import Nucleus
from vime.errors import ModelError


@dataclass(frozen=True)
class Segments:
    """N entries as R consecutive segments, which may be empty."""

    rows: torch.Tensor
    """[N] int64: the segment of each entry."""
    lengths: torch.Tensor
    """[R] int64"""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [R]; 0 where a segment is empty."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0.0)

    def log_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [R]: log of the sum of exponentials; -inf where a segment is empty."""
        most = torch.segment_reduce(values, "max", lengths=self.lengths, unsafe=True, initial=-torch.inf)
        return most + self.sum((values - most[self.rows]).exp()).log()


def segments_of(nucleus: Nucleus, num_rows: int) -> Segments:
    """Raises `ModelError` when the offsets don't cut the entries into `num_rows` segments."""
    offsets, num_entries = nucleus.offsets.long(), nucleus.ids.numel()
    lengths = offsets.diff()
    fits = lengths.numel() == num_rows and bool((offsets[0] == 0) & (offsets[-1] == num_entries) & (lengths >= 0).all())
    if not fits:
        raise ModelError(
            f"nucleus offsets of {lengths.numel()} rows end at {int(offsets[-1])}, allowed: {num_rows} rows that never "
            f"fall from 0 to the {num_entries} recorded ids.",
            next_step="The sample was stored wrongly: generate it again.",
        )
    rows = torch.arange(num_rows, device=offsets.device).repeat_interleave(lengths, output_size=num_entries)
    return Segments(rows, lengths)


def replay_log_prob(
    target_logits: torch.Tensor,
    logits: torch.Tensor,
    log_total: torch.Tensor,
    targets: torch.Tensor,
    nucleus: Nucleus,
    segments: Segments,
) -> Score:
    """Log-probability of the targets among the recorded tokens; a target that isn't recorded counts as recorded.

    Rows without a recorded nucleus keep the whole vocabulary. `target_logits` and `log_total` [R], `logits` [N],
    float64.
    """
    recorded = segments.lengths > 0
    is_target = nucleus.ids.long() == targets[segments.rows]
    target_is_missing = segments.sum(is_target.double()) == 0
    log_kept = segments.log_sum(logits)
    log_kept = torch.logaddexp(log_kept, target_logits).where(target_is_missing, log_kept).where(recorded, log_total)
    values = target_logits - log_kept
    missing_probability = values.exp().where(target_is_missing & recorded, 0.0)
    return Score(
        values,
        softmax_factor=-(~recorded).float(),
        at_target=(1.0 - missing_probability).float(),
        at_recorded=-(logits - log_kept[segments.rows]).exp().float(),
    )


def center_nucleus(
    logits: torch.Tensor, log_total: torch.Tensor, log_q: torch.Tensor, segments: Segments, rule: WeightRule
) -> Centering:
    """Exact correction over the recorded tokens, trainer renormalised on them (arXiv 2609.20807, eq. 12).

    `logits` [N] and `log_total` [R] float64, `log_q` [N] the sampler's normalised log-probabilities. Rows without
    recorded tokens get 0.
    """
    log_support, log_q = segments.log_sum(logits), log_q.double()
    log_p = logits - log_support[segments.rows]
    p = log_p.exp()
    coefficients = log_q.exp() * rule((log_p - log_q).exp()) - rule(torch.ones_like(p)) * p
    correction = Score(
        segments.sum(coefficients * log_p),
        at_recorded=(coefficients - segments.sum(coefficients)[segments.rows] * p).float(),
    )
    return Centering(
        correction,
        train_mass=(log_support - log_total).exp(),
        sampler_mass=segments.sum(log_q.exp()),
    )
