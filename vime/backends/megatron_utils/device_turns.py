"""Models of one rank that have the device's memory by turns."""

from __future__ import annotations

from typing import Protocol


class Movable(Protocol):
    """Something whose memory can leave the device and come back."""

    def move_out(self) -> int:
        """Leave; the bytes freed, 0 when it is out already."""

    def move_in(self) -> None:
        """Come back; does nothing when it is in."""


class DeviceTurns:
    """Whoever works is on the device, the others are in host memory.

    Alone, a model never moves until `rest`.
    """

    def __init__(self) -> None:
        self._models: list[Movable] = []

    def join(self, model: Movable) -> None:
        """Take part; whoever was there leaves, to make room for the one that is built."""
        self.rest()
        self._models.append(model)

    def take(self, model: Movable) -> None:
        """Let `model` be on the device, after all others have left it."""
        for other in self._models:
            if other is not model:
                other.move_out()
        model.move_in()

    def rest(self) -> int:
        """Leave the device to other processes until the next turn; the bytes freed."""
        return sum(model.move_out() for model in self._models)
