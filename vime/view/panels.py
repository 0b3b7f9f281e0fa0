"""The numbers that matter, as panels: what each shows of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.alarms import ENTROPY, GAP
from pipeline.progress import StepRecord

Value = Callable[[StepRecord], float | None]


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    name: str
    value: Value
    """None where a step lacks the number."""
    second_axis: bool = False
    is_share: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot over rollout batches."""

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    meaning: str
    spread: Value | None = None
    """Half the height of a band around the first line."""


@dataclass(frozen=True)
class PlottedLine:
    """The numbers of one line."""

    line: Line
    rollouts: list[int]
    values: list[float | None]
    """None where there is no finite number."""
    spreads: list[float | None] | None = None

    @property
    def newest(self) -> float | None:
        """The last number."""
        return self.values[-1] if self.values else None


def _train(name: str) -> Value:
    return lambda step: step.train.get(name)


def _dropped(reason: str) -> Value:
    return lambda step: float(step.dropped.get(reason, 0))


DROPS = "drops"

PANELS = (
    Panel(
        "reward", "Reward", "", (Line("mean", lambda step: step.reward_mean),),
        "Mean over the batch's samples; the band is one standard deviation.", lambda step: step.reward_std,
    ),
    Panel(
        "signal", "Groups with signal", "share", (Line("share", lambda step: step.signal_share, is_share=True),),
        "Groups whose members' rewards differ; the others teach nothing.",
    ),
    Panel(
        "length", "Length and truncation", "tokens",
        (
            Line("mean length", lambda step: step.response_tokens_mean),
            Line("truncated", lambda step: step.truncated_share, second_axis=True, is_share=True),
        ),
        "Mean response length, and the share of samples cut off at the limit.",
    ),
    Panel("loss", "Loss", "", (Line("loss", _train("loss")),), "What the last optimizer step of the batch minimised."),
    Panel("grad_norm", "Gradient norm", "", (Line("norm", _train("grad_norm")),), "Before clipping."),
    Panel("entropy", "Entropy", "nats", (Line("entropy", _train(ENTROPY)),), "Of the policy at response tokens."),
    Panel(
        "gap", "Sampler-trainer gap", "nats", (Line("gap", _train(GAP)),),
        "Mean absolute difference of the sampler's and the trainer's log-probability of a token.",
    ),
    Panel(
        "age", "Age in versions", "versions",
        (Line("mean", lambda step: step.staleness_mean), Line("max", lambda step: float(step.staleness_max))),
        "Policy version when the batch was planned, minus that of a sample's oldest token.",
    ),
    Panel(
        "queue", "Queue", "groups",
        (Line("pending", lambda step: float(step.pending)), Line("in flight", lambda step: float(step.in_flight))),
        "Groups that wait to be trained, and groups that are being generated.",
    ),
    Panel(
        "tokens", "Tokens per second", "tokens/s",
        (
            Line("generated", lambda step: step.generated_tokens_per_s),
            Line("trained", lambda step: step.trained_tokens_per_s),
        ),
        "Response tokens of both sides, over the time of the batch.",
    ),
    Panel(
        "idle", "Idle shares", "share",
        (
            Line("trainer", lambda step: step.trainer_idle_share, is_share=True),
            Line("engines", lambda step: step.generator_idle_share, is_share=True),
        ),
        "Of the time since the session began.",
    ),
    Panel(DROPS, "Drops by reason", "groups", (), "Groups set aside for good; see dead letters."),
)  # fmt: skip
"""In the order of the page. The lines of drops are the reasons that a run has."""


def panel_lines(panel: Panel, steps: Sequence[StepRecord]) -> list[PlottedLine]:
    """The numbers of a panel, one entry for each of `steps`."""
    rollouts = [step.rollout_id for step in steps]
    lines = panel.lines
    if panel.key == DROPS:
        lines = tuple(Line(reason, _dropped(reason)) for reason in sorted({r for s in steps for r in s.dropped}))
    return [
        PlottedLine(
            line,
            rollouts,
            [_finite(line.value(step)) for step in steps],
            [_finite(panel.spread(step)) for step in steps] if panel.spread is not None and number == 0 else None,
        )
        for number, line in enumerate(lines)
    ]


def shown(value: float | None, *, is_share: bool = False) -> str:
    """A number for people."""
    if value is None:
        return "–"
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if (value == int(value) and abs(value) < 1e15) or abs(value) >= 1e5 else f"{value:.4g}"


def newest_words(lines: Sequence[PlottedLine]) -> str:
    """The newest numbers of a panel in one line."""
    if not lines:
        return "none"
    words = []
    for plotted in lines:
        spread = plotted.spreads[-1] if plotted.spreads else None
        words.append(
            (f"{plotted.line.name} " if len(lines) > 1 else "")
            + shown(plotted.newest, is_share=plotted.line.is_share)
            + (f" ± {shown(spread)}" if spread is not None else "")
        )
    return " · ".join(words)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
