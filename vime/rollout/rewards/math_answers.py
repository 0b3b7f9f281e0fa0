r"""Mathematical answers, compared by math-verify: \frac{1}{2} is 0.5."""

from __future__ import annotations

import re

from math_verify import parse, verify

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer, after_thinking
from vime.rollout.rewards.boxed import last_boxed

COMPARE_S = 5
"""Seconds after which an answer that can't be read or compared counts as wrong."""
_DAPO_TAIL = 300
"""Characters at a response's end in which DAPO looks for the answer."""
_DAPO_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def math(answer: Answer) -> float:
    """1 when the response's answer (the last boxed one, or what reads like the final one) is a label, else 0.

    Raises:
        RewardError: there is no label.
    """
    return float(_is_one_of(answer.response, answer.labels()))


def deepscaler(answer: Answer) -> float:
    r"""1 when the last `\boxed{...}` after the thinking is a label; 0 otherwise, also without `</think>` or box.

    Raises:
        RewardError: there is no label.
    """
    labels = answer.labels()
    boxed = last_boxed(after_thinking(answer.response) or "")
    return float(boxed is not None and _is_one_of(in_box(boxed), labels))


def dapo(answer: Answer) -> dict[str, float]:
    r"""`{"score": 1 or -1, "acc": 1 or 0}` for the last `Answer: ...` line or `\boxed{...}` near the response's end.

    Source: DAPO (arXiv 2503.14476), rule-based reward. Raises `RewardError` when there is no label.
    """
    labels, tail = answer.labels(), answer.response[-_DAPO_TAIL:]
    stated = _DAPO_ANSWER.findall(tail)
    found = stated[-1].strip().removesuffix("</s>") if stated else last_boxed(tail)
    right = found is not None and _is_one_of(found if "$" in found or "\\boxed" in found else in_box(found), labels)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def in_box(text: str) -> str:
    """The text as an answer that can't be mistaken for anything else."""
    return rf"\boxed{{{text}}}"


def _is_one_of(response: str, labels: list[str]) -> bool:
    found = parse(response, parsing_timeout=COMPARE_S)
    boxed = last_boxed(response)
    return any(
        (boxed is not None and boxed.strip() == label) or verify(_gold(label), found, timeout_seconds=COMPARE_S)
        for label in labels
    )


def _gold(label: str) -> list[object]:
    """Raises `RewardError` for a label in which no answer can be found."""
    gold: list[object] = parse(
        label if "\\boxed" in label or "$" in label else in_box(label), parsing_timeout=COMPARE_S
    )
    if not gold:
        raise RewardError(
            f"no mathematical answer can be read in the label {label!r}.",
            next_step="Correct the record, or choose another --rm-type.",
            reason="reward_label",
        )
    return gold
