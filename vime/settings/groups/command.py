"""Where the settings themselves come from."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.flag import flag


@dataclass(frozen=True)
class CommandSettings:
    """Where the settings themselves come from."""

    config: str | None = flag(
        None, "TOML or YAML file with a table for each group; flags on the command line win.", cli_only=True
    )
    custom_config_path: str | None = flag(
        None, "YAML file with flat keys that are set last, over the command line; each is logged."
    )
    dry_run: bool = flag(False, "Check the settings, print them with their sources, and stop.", cli_only=True)
