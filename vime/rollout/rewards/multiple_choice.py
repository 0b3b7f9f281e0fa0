"""Questions with lettered choices, as in GPQA (arXiv 2311.12022)."""

from __future__ import annotations

import re
import string

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer, after_thinking
from vime.rollout.rewards.boxed import last_boxed

_STATED = re.compile(r"(?i:answer|choice|option)\s*(?:(?i:is)|:|=)?\s*[*_$(\[{]*\s*([A-Z])\b(?!['’])")
_ALONE = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'’])")
_IN_BOX = re.compile(r"(?:\\text\w*\s*\{|[(\s])*([A-Za-z])(?:[.):}\s]|$)")


def gpqa(answer: Answer) -> float:
    """1 when the response chooses the right letter, else 0.

    The label is the letter, or the text of the right choice, or its number from 0; for the latter two
    `metadata["choices"]` lists the choices. `metadata["correct_letter"]` goes before the label. Letters that name no
    choice don't count; without a list of choices these are A to D.

    Raises:
        RewardError: label and choices don't tell which letter is right.
    """
    choices = answer.metadata.get("choices")
    num_choices = len(choices) if isinstance(choices, list) and choices else 4
    letters = string.ascii_uppercase[:num_choices]
    return float(chosen_letter(answer.response, letters) == _right_letter(answer, letters))


def chosen_letter(response: str, letters: str) -> str | None:
    """The letter that a response decides for: boxed, or stated as the answer, or the last that stands alone."""
    text = after_thinking(response) or response
    boxed = _IN_BOX.match(last_boxed(text) or "")
    if boxed is not None and boxed.group(1).upper() in letters:
        return boxed.group(1).upper()
    for pattern in (_STATED, _ALONE):
        found = [letter for letter in pattern.findall(text) if letter in letters]
        if found:
            return str(found[-1])
    return None


def _right_letter(answer: Answer, letters: str) -> str:
    label = answer.metadata.get("correct_letter", answer.label)
    choices = answer.metadata.get("choices")
    if isinstance(label, str) and label.strip().upper() in letters and len(label.strip()) == 1:
        return label.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    if isinstance(choices, list) and label in choices:
        return letters[choices.index(label)]
    raise RewardError(
        f"the label is {label!r} with the choices {choices!r}, allowed: a letter of {letters}, or one of "
        'metadata["choices"], or its number.',
        next_step="Correct the record.",
        reason="reward_label",
    )
