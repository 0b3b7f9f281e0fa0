"""Print the declaration of a JuiceFS mount that something else made (systemd, Kubernetes):

`python -m deploy.juicefs.declare MOUNT --durability TEXT > declaration.json`, in the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from storage.juicefs import declaration_of, read_options, unsafe_options


def main(words: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description="Print the declaration of a JuiceFS mount from what its client says.")
    parser.add_argument("mount", metavar="MOUNT", type=Path, help="its mount point")
    parser.add_argument("--durability", required=True, help="where objects and metadata are kept, and what syncs them")
    options = parser.parse_args(words)
    try:
        found = read_options(options.mount)
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"error: {options.mount}: no JuiceFS client says how it is mounted ({error!r}).", file=sys.stderr)
        return 1
    wrong = unsafe_options(found)
    if wrong:
        print(f"error: {options.mount} can't hold the queue: {'; '.join(wrong)}.", file=sys.stderr)
        return 1
    print(json.dumps(declaration_of(found, options.durability), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
