"""Write the options of the installed vLLM into `vime/backends/vllm_utils/vllm_flags.json`.

Run after a change of vLLM's version: `python scripts/list_vllm_flags.py`. Names of `--vllm-*` flags are checked with
it, without importing vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

from vime.backends.vllm_utils import arguments

TARGET = Path(arguments.__file__).with_name(arguments.VLLM_FLAGS_FILE)


def content() -> str:
    """The file's text for the installed vLLM."""
    import vllm

    return json.dumps({"version": vllm.__version__, "options": sorted(arguments.known_options())}, indent=0) + "\n"


if __name__ == "__main__":
    TARGET.write_text(content())
    print(f"{TARGET}: written")
