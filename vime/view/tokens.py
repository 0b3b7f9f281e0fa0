"""How the tokens of a sample are coloured. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.sample_view import TokenView

MASKED = "#f4f4f5"
VERSION_COLOURS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fecaca", "#ddd6fe", "#a5f3fc", "#fbcfe8", "#d9f99d")
LOG_PROB_FLOOR = -6.0
"""Nats; tokens that were less likely get the strongest colour."""


@dataclass(frozen=True)
class ColouredToken:
    """One response token."""

    text: str
    colour: str
    words: str
    """What is known of it."""


def by_version(token: TokenView, _advantage: float | None) -> str:
    """One colour for each policy version."""
    return MASKED if token.version is None else VERSION_COLOURS[token.version % len(VERSION_COLOURS)]


def by_log_prob(token: TokenView, _advantage: float | None) -> str:
    """The redder, the less likely the token was under the policy that sampled it."""
    if token.log_prob is None or not math.isfinite(token.log_prob):
        return MASKED
    return f"rgba(220,38,38,{min(token.log_prob / LOG_PROB_FLOOR, 1.0) * 0.7:.3f})"


def by_advantage(token: TokenView, advantage: float | None) -> str:
    """Green where training makes the token likelier, red where less likely, grey where it doesn't count."""
    if advantage is None or not token.trained or advantage == 0 or not math.isfinite(advantage):
        return MASKED
    strength = min(abs(advantage) / 2, 1.0) * 0.6 + 0.1
    return f"rgba({'5,150,105' if advantage > 0 else '220,38,38'},{strength:.3f})"


COLOURINGS: dict[str, Callable[[TokenView, float | None], str]] = {
    "policy version": by_version,
    "advantage": by_advantage,
    "log-probability": by_log_prob,
}


def coloured(tokens: Sequence[TokenView], colouring: str, advantage: float | None) -> list[ColouredToken]:
    """Tokens of a response with their colours. `colouring` is one of `COLOURINGS`."""
    colour = COLOURINGS[colouring]
    return [
        ColouredToken(
            text=f"{token.token_id} " if token.text is None else token.text,
            colour=colour(token, advantage),
            words=_words(token, advantage),
        )
        for token in tokens
    ]


def _words(token: TokenView, advantage: float | None) -> str:
    words = [f"position {token.position}", f"id {token.token_id}"]
    words.append("not sampled" if token.version is None else f"policy version {token.version}")
    if token.log_prob is not None:
        words.append(f"log-probability {token.log_prob:.4f}")
    words.append("trained" if token.trained else "not trained")
    if advantage is not None and token.trained:
        words.append(f"advantage {advantage:.4f}")
    return ", ".join(words)
