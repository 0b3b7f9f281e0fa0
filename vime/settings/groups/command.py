"""Where the settings themselves come from."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import at_least, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class CommandSettings:
    """Where the settings themselves come from."""

    config: str | None = flag(
        None,
        "TOML or YAML file with a table for each group; flags on the command line win.",
        cli_only=True,
        check=place,
    )
    custom_config_path: str | None = flag(
        None, "YAML file with flat keys that are set last, over the command line; each is logged.", check=place
    )
    dry_run: bool = flag(
        False,
        "Start nothing; print the settings and their sources, who runs where, and what to expect.",
        cli_only=True,
        common=True,
    )
    json: bool = flag(False, "Print the result of --dry-run as JSON.", cli_only=True)
    assume_gpus: int | None = flag(
        None, "Plan --dry-run for so many GPUs instead of this machine's.", check=at_least(1), cli_only=True
    )
