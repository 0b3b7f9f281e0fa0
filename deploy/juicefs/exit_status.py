"""How the scripts of this folder end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from deploy.juicefs.volume import VolumeError
from vime.errors import StorageError


def exit_status(run: Callable[[], None]) -> int:
    """Of a script that does this: 0, or 1 when it fails, with the error said."""
    try:
        run()
    except (VolumeError, StorageError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
