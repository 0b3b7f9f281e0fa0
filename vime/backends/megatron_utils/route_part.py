"""Which of the recorded routes a rank replays. Pure: no framework is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.backends.megatron_utils.context import WHOLE, ContextShare, Positions, tokens_of_rank


@dataclass(frozen=True)
class RoutePart:
    """The layers and tokens of one rank: others hold the rest of the model, or of each pack."""

    layers: tuple[int, ...]
    """Numbers in the whole model, from 0, of the layers with experts that the rank holds."""
    places: tuple[int, ...]
    """Where each of them is among the layers with experts of the whole model, ascending; routes are stored so."""
    top_k: int
    """Experts of a token."""
    share: ContextShare = WHOLE
    rank_multiple: int = 1
    """A rank's tokens are padded to a multiple of this."""

    def tokens(self, lengths: Sequence[int]) -> Positions:
        """Which tokens of sequences of `lengths` end to end the rank holds, ascending."""
        return tokens_of_rank(lengths, self.share, self.rank_multiple)[0]
