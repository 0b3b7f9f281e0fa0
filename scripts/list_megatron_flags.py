"""Write the flags of the installed Megatron into `vime/settings/megatron_flags.json`.

Run after a change of Megatron's version: `python scripts/list_megatron_flags.py`. vime's settings tell Megatron's flags
from misspelt ones of vime with it, without importing Megatron.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from vime.backends.megatron_utils.arguments import known_megatron_flags, megatron_destinations
from vime.settings.passed_on import MEGATRON_FLAGS_FILE

TARGET = Path(__file__).resolve().parents[1] / "vime" / "settings" / MEGATRON_FLAGS_FILE


def content() -> str:
    """The file's text for the installed Megatron."""
    listed = {
        "version": metadata.version("megatron-core"),
        "flags": sorted(known_megatron_flags()),
        "destinations": sorted(megatron_destinations()),
    }
    return json.dumps(listed, indent=0) + "\n"


if __name__ == "__main__":
    TARGET.write_text(content())
    print(f"{TARGET}: written")
