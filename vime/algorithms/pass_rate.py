"""pass@k: the probability that at least one of k answers to a prompt is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CORRECT = 1.0
"""The reward of a right answer."""


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Unbiased estimate from `num_answers` of at least k answers, `num_correct` of which are right.

    1 - C(n - c, k) / C(n, k), as a product (Chen et al. 2021, Evaluating Large Language Models Trained on Code).
    """
    if num_answers - num_correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_answers - num_correct + 1, num_answers + 1)))


def pass_rates(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """k -> mean pass@k over prompts, for k = 1, 2, 4, ... up to the most answers that a prompt has.

    `rewards` are those of each prompt's answers. Prompts with fewer than k answers are left out of pass@k.
    """
    counts = [(len(answers), sum(reward == CORRECT for reward in answers)) for answers in rewards]
    most = max((num_answers for num_answers, _ in counts), default=0)
    rates, k = {}, 1
    while k <= most:
        rates[k] = float(np.mean([pass_at_k(n, c, k) for n, c in counts if n >= k]))
        k *= 2
    return rates
