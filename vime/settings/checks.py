"""Checks of one value, for `flag(check=...)`."""

from __future__ import annotations

import re

from vime.folders import unreachable
from vime.settings.flag import Check


def at_least(minimum: float) -> Check:
    """`minimum` or more."""
    return Check(lambda value: value >= minimum, f"{minimum} or more")


def above(limit: float) -> Check:
    """More than `limit`."""
    return Check(lambda value: value > limit, f"more than {limit}")


def above_up_to(limit: float, maximum: float) -> Check:
    """More than `limit`, `maximum` or less."""
    return Check(lambda value: limit < value <= maximum, f"more than {limit}, {maximum} or less")


def between(minimum: float, maximum: float) -> Check:
    """From `minimum` to `maximum`, both included."""
    return Check(lambda value: minimum <= value <= maximum, f"{minimum} to {maximum}")


def all_or_at_least(minimum: int) -> Check:
    """-1 for "no limit", or `minimum` or more."""
    return Check(lambda value: value == -1 or value >= minimum, f"-1, or {minimum} or more")


def _is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def _unreachable(path: str) -> str | None:
    return unreachable(path.partition("{")[0])


place = Check(lambda path: _unreachable(path) is None, "a path that can be looked up", _unreachable)
"""A file or folder, which needn't be there; with placeholders, what comes before the first."""
dotted_path = Check(
    lambda value: re.fullmatch(r"\w+(\.\w+)+", value) is not None, "an import path such as package.module.function"
)
host_and_port = Check(_is_address, "host:port")
"""An address such as `node3:8000` or `[::1]:8000`."""
