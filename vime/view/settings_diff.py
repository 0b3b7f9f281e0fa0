"""In which settings runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vime.errors import StorageError, reason_of

OF_NO_FLAG = frozenset({"sources"})
"""Groups of `settings.json` that hold no settings."""
PASSED_ON = ("megatron_args", "vllm_args", "router_args")
"""Lists of flags, as they are passed on to others."""


def read_settings(root: Path) -> dict[str, str]:
    """Flag -> value as JSON, of the newest session of the run in `root`. Raises `StorageError`."""
    path = root / "settings.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise StorageError(f"{path} can't be read: {reason_of(error)}.", next_step="Restore the file.") from error
    found: dict[str, str] = {}
    for group, values in content.items():
        if isinstance(values, dict) and group not in OF_NO_FLAG:
            found |= {f"--{name.replace('_', '-')}": _json(value) for name, value in values.items()}
        elif group in PASSED_ON:
            found |= _passed_on(values)
    return found


def differences(runs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """(flag, its value in each of `runs` or None) for the flags whose values differ, ascending."""
    flags = sorted({flag for run in runs for flag in run})
    rows = [(flag, [run.get(flag) for run in runs]) for flag in flags]
    return [(flag, values) for flag, values in rows if len(set(values)) > 1]


def _passed_on(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = [value] if equals else []
        else:
            found.setdefault(flag, []).append(word)
    return {flag: " ".join(values) for flag, values in found.items()}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
