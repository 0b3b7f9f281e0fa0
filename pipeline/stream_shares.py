"""What the producers' running totals say of the time since the batch before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.messages import ProducerStats
from pipeline.publication import Publication


class StreamShares:
    """Shares of the stretch between the last two calls of `update`."""

    def __init__(self, *, salts_prefixes: bool = True, reward: str = "") -> None:
        """`salts_prefixes`: requests of different policy versions share no cached keys and values. `reward` is the name
        of what scores the samples."""
        self._salts_prefixes, self.reward = salts_prefixes, reward
        self._totals = np.zeros(4)
        self._caches_hold_older = False
        self.stale_prefix = 0.0
        """Prompt tokens from prefix caches that may hold what older weights computed, of all prompt tokens."""
        self.reward_time = 0.0
        """Of the seconds that samples were generated or in the reward, those in the reward."""

    def update(self, stats: Sequence[ProducerStats], publication: Publication | None) -> None:
        """A batch was trained, and this followed it, if anything did. A producer that was replaced counts from 0."""
        totals = np.asarray(
            [
                sum(stat.cached_prompt_tokens for stat in stats),
                sum(stat.prompt_tokens for stat in stats),
                sum(stat.reward_s for stat in stats),
                sum(stat.generating_s for stat in stats),
            ],
            dtype=np.float64,
        )
        cached, prompt, reward_s, generating_s = np.maximum(totals - self._totals, 0.0)
        self._totals = totals
        self.stale_prefix = _share(cached, prompt) if self._caches_hold_older else 0.0
        self.reward_time = _share(reward_s, reward_s + generating_s)
        if publication is not None and publication.raised and not self._salts_prefixes:
            self._caches_hold_older = not publication.flushed


def _share(part: float, whole: float) -> float:
    return min(1.0, float(part / whole)) if whole > 0 else 0.0
