"""How the tokens of a sample are coloured. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from pipeline.sample_view import TokenView

MASKED = "#f4f4f5"
VERSION_COLOURS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fecaca", "#ddd6fe", "#a5f3fc", "#fbcfe8", "#d9f99d")
RED, GREEN, BLUE = "220,38,38", "5,150,105", "37,99,235"
LOG_PROB_FLOOR = -6.0
"""Nats; tokens that were less likely get the strongest colour."""
GAP_CEILING = 0.5
"""Nats; larger gaps get the strongest colour."""
STRONGEST = 0.7
"""Opacity."""

Colouring = Callable[[TokenView], str]


@dataclass(frozen=True)
class ColouredToken:
    """One response token."""

    text: str
    colour: str
    words: str
    """What is known of it."""


@dataclass(frozen=True)
class LegendEntry:
    """What a colour means."""

    colour: str
    words: str


def by_version(token: TokenView) -> str:
    """One colour for each policy version."""
    return MASKED if token.version is None else VERSION_COLOURS[token.version % len(VERSION_COLOURS)]


def by_log_prob(token: TokenView) -> str:
    """The redder, the less likely the token was under the policy that sampled it."""
    if not _is_number(token.log_prob):
        return MASKED
    return _rgba(RED, min(token.log_prob / LOG_PROB_FLOOR, 1.0) * STRONGEST)


def by_advantage(token: TokenView) -> str:
    """Green where training makes the token likelier, red where less likely, grey where it doesn't count."""
    if not _is_number(token.advantage) or token.advantage == 0:
        return MASKED
    return _rgba(GREEN if token.advantage > 0 else RED, min(abs(token.advantage) / 2, 1.0) * 0.6 + 0.1)


def by_gap(token: TokenView) -> str:
    """Blue where the trainer finds the token likelier than the sampler did, red where less likely."""
    if not _is_number(token.gap):
        return MASKED
    return _rgba(BLUE if token.gap > 0 else RED, min(abs(token.gap) / GAP_CEILING, 1.0) * STRONGEST)


COLOURINGS: dict[str, Colouring] = {
    "policy version": by_version,
    "advantage": by_advantage,
    "log-probability": by_log_prob,
    "gap to the trainer": by_gap,
}


def coloured(tokens: Sequence[TokenView], colouring: str) -> list[ColouredToken]:
    """Tokens of a response with their colours. `colouring` is one of `COLOURINGS`."""
    colour = COLOURINGS[colouring]
    return [
        ColouredToken(
            text=f"{token.token_id} " if token.text is None else token.text, colour=colour(token), words=_words(token)
        )
        for token in tokens
    ]


def legend(tokens: Sequence[TokenView], colouring: str) -> list[LegendEntry]:
    """What the colours of some tokens mean."""
    found: list[LegendEntry]
    if COLOURINGS[colouring] is by_version:
        versions = {token.version: by_version(token) for token in tokens if token.version is not None}
        found = [LegendEntry(versions[version], f"version {version}") for version in sorted(versions)]
    elif COLOURINGS[colouring] is by_advantage:
        found = [LegendEntry(_rgba(GREEN, 0.4), "made likelier"), LegendEntry(_rgba(RED, 0.4), "made less likely")]
    elif COLOURINGS[colouring] is by_log_prob:
        found = [LegendEntry(_rgba(RED, STRONGEST), f"{LOG_PROB_FLOOR:g} nats or less")]
    else:
        found = [
            LegendEntry(_rgba(BLUE, STRONGEST), f"the trainer's is {GAP_CEILING:g} nats or more above the sampler's"),
            LegendEntry(_rgba(RED, STRONGEST), f"{GAP_CEILING:g} nats or more below"),
        ]
    grey = [LegendEntry(MASKED, "not known, or doesn't count")]
    return found + (grey if any(COLOURINGS[colouring](token) == MASKED for token in tokens) else [])


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _rgba(colour: str, opacity: float) -> str:
    return f"rgba({colour},{opacity:.3f})"


def _words(token: TokenView) -> str:
    words = [f"position {token.position}", f"id {token.token_id}"]
    words.append("not sampled" if token.version is None else f"policy version {token.version}")
    if token.log_prob is not None:
        words.append(f"log-probability {token.log_prob:.4f}")
    if token.trainer_log_prob is not None:
        words.append(f"the trainer's {token.trainer_log_prob:.4f}")
    if token.gap is not None:
        words.append(f"gap {token.gap:+.4f}")
    words.append("trained" if token.trained else "not trained")
    if token.advantage is not None:
        words.append(f"advantage {token.advantage:.4f}")
    return ", ".join(words)
