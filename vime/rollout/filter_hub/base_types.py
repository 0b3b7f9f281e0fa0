"""What filters of groups return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained."""

    keep: bool
    reason: str | None = None
    """Why not; rejected groups are counted by it."""
    keep_when_insufficient: bool = False
    """Train a rejected group all the same where `generate_rollout` would else have to generate another one for it."""
