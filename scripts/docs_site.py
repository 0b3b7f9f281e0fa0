"""Hook of MkDocs: the design notes in the site's menu, the newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Add the notes of `docs/design` to the menu of mkdocs.yml; their titles are their first lines."""
    folder = Path(config.docs_dir) / "design"
    notes = sorted((f"design/{path.name}" for path in folder.glob("*.md")), reverse=True)
    config.nav = [*config.nav, {"Design notes": notes}]
    return config
