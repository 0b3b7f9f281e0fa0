"""`Settings` from a command line, and the view of them that user hooks get."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from vime.settings.groups import GROUPS, Settings
from vime.settings.resolve import resolve


def parse_settings(argv: Sequence[str]) -> Settings:
    """Settings of a command line, without their sources. Raises `SettingsError` as `resolve` does."""
    return resolve(argv).settings


class HookArgs:
    """Read-only flat view of the settings, for user hooks: `args.hf_checkpoint`, `args.rollout_temperature`, ..."""

    def __init__(self, settings: Settings) -> None:
        flat: dict[str, Any] = {}
        for name in GROUPS:
            flat.update(dataclasses.asdict(vars(settings)[name]))
        object.__setattr__(self, "_values", flat)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"args has no {name!r}; it holds the documented flags of vime") from None

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} can't be set from a hook")
