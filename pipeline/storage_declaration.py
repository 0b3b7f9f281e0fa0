"""The file in which the operator declares a JuiceFS mount's options."""

from __future__ import annotations

import json
from pathlib import Path

from vime.errors import SettingsError, reason_of


def read_declaration(path: str | None) -> dict[str, object] | None:
    """The JuiceFS declaration, when one is named."""
    if path is None:
        return None
    try:
        declaration: dict[str, object] = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"--rollout-storage-declaration {path}: {reason_of(error)}.", next_step="Name a readable JSON file."
        ) from error
    return declaration
