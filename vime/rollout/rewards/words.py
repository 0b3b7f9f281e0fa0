"""Overlap of words."""

from __future__ import annotations

import collections

from vime.rollout.rewards.answers import Answer


def f1(answer: Answer) -> float:
    """F1 overlap of whitespace-separated words between response and label."""
    found, wanted = answer.response.split(), str(answer.label).split()
    common = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
