"""Checks of one value, for `flag(check=...)`: None when it is allowed, else what is."""

from __future__ import annotations

import re
from typing import Any

from vime.settings.flag import Check


def at_least(minimum: float) -> Check:
    """`minimum` or more."""
    return lambda value: None if value >= minimum else f"{minimum} or more"


def above(limit: float) -> Check:
    """More than `limit`."""
    return lambda value: None if value > limit else f"more than {limit}"


def above_up_to(limit: float, maximum: float) -> Check:
    """More than `limit`, `maximum` or less."""
    return lambda value: None if limit < value <= maximum else f"more than {limit}, {maximum} or less"


def between(minimum: float, maximum: float) -> Check:
    """From `minimum` to `maximum`, both included."""
    return lambda value: None if minimum <= value <= maximum else f"{minimum} to {maximum}"


def all_or_at_least(minimum: int) -> Check:
    """-1 for "no limit", or `minimum` or more."""
    return lambda value: None if value == -1 or value >= minimum else f"-1, or {minimum} or more"


def dotted_path(value: Any) -> str | None:
    """An import path such as `package.module.function`."""
    return None if re.fullmatch(r"\w+(\.\w+)+", value) else "an import path such as package.module.function"


def host_and_port(value: Any) -> str | None:
    """An address such as `node3:8000` or `[::1]:8000`."""
    host, _, port = value.rpartition(":")
    fits = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    return None if fits else "host:port"
