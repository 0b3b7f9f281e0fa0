"""`down.sh`: unmount a volume, end what `up.sh` started for it, and keep its data."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.juicefs.exit_status import exit_status
from deploy.juicefs.mounts import unmount
from deploy.juicefs.packages import find_juicefs
from deploy.juicefs.processes import own_processes
from deploy.juicefs.services import stop_services
from deploy.juicefs.volume import Volume, VolumeError

DESCRIPTION = """\
Unmount the volume in DIR and end the processes that up.sh started for it; they carry DIR in their environment and are
recorded in it, so no others are ever ended. The data stays, and up.sh mounts it again. A second down.sh changes
nothing."""
OWN = ("volume.json", "processes.json", "declaration.json", "redis", "gateway", "logs", "cache", "secrets", "mnt")
"""What `up.sh` makes in DIR."""


def down(volume: Volume, *, purge: bool) -> None:
    """Unmount, stop the servers, and with `purge` remove what was made. Raises `VolumeError` for a mount in use."""
    for mount in volume.mounts:
        unmount(volume, find_juicefs(), mount)
    stop_services(volume)
    left = own_processes(volume.folder)
    if left:
        raise VolumeError(f"Processes {left} of {volume.folder} still run. End them yourself.")
    if not purge:
        print(f"Nothing of {volume.folder} runs; its data, if any, stays.")
        return
    for mount in volume.mounts:
        if mount.is_dir() and not mount.is_mount():
            mount.rmdir()  # never what is in it, which is not ours
    for name in OWN:
        path = volume.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    print(f"Removed the volume in {volume.folder}.")


def plan(volume: Volume, *, purge: bool) -> list[str]:
    """What `down` would do."""
    steps = [f"unmount {mount}" for mount in volume.mounts]
    steps += [f"end process {pid}" for pid in own_processes(volume.folder)]
    if purge:
        steps += [f"remove {volume.folder / name}" for name in OWN if (volume.folder / name).exists()]
    return steps


def main(words: Sequence[str] | None = None) -> int:
    """Run `down.sh`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="down.sh", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder that up.sh was given")
    parser.add_argument("--purge", action="store_true", help="remove the volume with all data that lies in DIR")
    parser.add_argument("--dry-run", action="store_true", help="print the steps, take none of them")
    options = parser.parse_args(words)

    def run() -> None:
        volume = Volume.of(options.folder)
        if options.dry_run:
            print("\n".join(plan(volume, purge=options.purge)))
        else:
            down(volume, purge=options.purge)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
