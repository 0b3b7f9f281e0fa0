"""What one publication of weights did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Publication:
    """What one publication did."""

    version: int
    """The version that serves now."""
    raised: bool
    """Whether it is a new one; otherwise the engines serve the old one, and the next publication tries again."""
    flushed: bool
    wire_bytes: int
    """Bytes sent or written."""
    density: float
    """Share of the weights' bytes that travelled as changed."""
    prepare_s: float
    """Seconds in which the engines sampled on."""
    pause_s: float
    """Seconds in which the engines stood still: as they measure it, where weights change between two steps."""
    fenced: dict[str, str]
    """Engines that get no requests -> why, but for those that were given up."""
    returned: list[str] = field(default_factory=list)
    """Engines that got no requests before, and do now."""
    change_s: float = 0.0
    """Seconds in which no request was let in: those of a halt, or of the calls that change weights without one."""
