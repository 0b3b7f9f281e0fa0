"""What a grader is given, as plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from vime.errors import RewardError


class Answer(msgspec.Struct, frozen=True):
    """A sample as graders see it."""

    response: str
    label: Any = None
    metadata: dict[str, Any] = {}
    prompt: str | list[dict[str, Any]] = ""

    def labels(self) -> list[str]:
        """The label, or each of several, as text.

        Raises:
            RewardError: there is none, or it is neither text nor a number.
        """
        given = self.label if isinstance(self.label, list) else [self.label]
        texts = [str(label).strip() for label in given if isinstance(label, str | int | float)]
        if not texts or len(texts) != len(given) or not all(texts):
            raise RewardError(
                f"the label is {self.label!r}, allowed: text, a number, or a list of these.",
                next_step="Name the records' answer with --label-key.",
                reason="reward_label",
            )
        return texts


def after_thinking(response: str) -> str | None:
    """What follows the last `</think>`; None when there is none."""
    _, marker, answer = response.rpartition("</think>")
    return answer if marker else None
