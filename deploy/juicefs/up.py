"""`up.sh`: bring up a JuiceFS volume on this machine and declare what was mounted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.juicefs.exit_status import exit_status
from deploy.juicefs.mounts import declare, format_command, make_volume, mount_command, mount_volume
from deploy.juicefs.packages import find_juicefs, install_packages, missing_packages, require_fuse, require_packages
from deploy.juicefs.services import gateway_commands, redis_command, start_gateway, start_redis
from deploy.juicefs.volume import Volume, VolumeError, without_password
from storage.files import write_atomically

DESCRIPTION = """\
Bring up a JuiceFS volume on this machine for vime's durable queue, and write DIR/declaration.json from what was
mounted. What runs already is kept, what is missing is started; a mount whose client died is mounted anew.

Without --meta-url it starts Redis (appendfsync always, noeviction, loopback, a port and a password of its own);
without --bucket it starts a JuiceFS gateway as S3 endpoint. Both keep everything in DIR. That local S3 endpoint does
not sync its files, so it is for trying and for tests: a queue that must survive power loss needs a real bucket."""
EPILOG = """\
environment:
  META_PASSWORD            password of the --meta-url engine
  ACCESS_KEY, SECRET_KEY   keys of the --bucket
  VIME_PYTHON              interpreter with vime's packages; else the repository's .venv, else python3
"""


def up(volume: Volume, *, install: bool) -> None:
    """Start what is missing, mount, check, declare."""
    require_fuse()
    if install:
        install_packages(volume)
    require_packages(volume)
    juicefs = find_juicefs()
    volume.save()
    if volume.has_own_redis:
        start_redis(volume)
    if volume.has_own_gateway:
        start_gateway(volume, juicefs)
    make_volume(volume, juicefs)
    for mount in volume.mounts:
        mount_volume(volume, juicefs, mount)
    declaration = declare(volume)
    write_atomically(volume.declaration, (json.dumps(declaration, indent=1) + "\n").encode())
    print(f"JuiceFS {declaration['client_version']} is mounted at {', '.join(map(str, volume.mounts))}.")
    print(f"Kept: {declaration['durability_description']}.")
    print(f"Flags: --rollout-storage-profile juicefs --rollout-storage-declaration {volume.declaration}")
    print(f"       --rollout-data-transport straw --rollout-data-dir {volume.mounts[0]}/RUN")
    peer = f" --peer {volume.mounts[1]}" if len(volume.mounts) > 1 else ""
    print(f"Check: vime doctor --storage {volume.mounts[0]}{peer}")


def plan(volume: Volume, *, install: bool) -> list[str]:
    """The commands that `up` would run, without passwords."""
    juicefs = find_juicefs()
    commands = []
    missing = missing_packages(volume)
    if missing:
        mark = "" if install else "# missing, not installed without --install: "
        commands.append(f"{mark}apt-get install -y --no-install-recommends {' '.join(missing)}")
    if volume.has_own_redis:
        commands.append(shlex.join(redis_command(volume)))
    if volume.has_own_gateway:
        commands += [shlex.join(command) for command in gateway_commands(volume, juicefs)]
    commands.append(f"{shlex.join(format_command(volume, juicefs))}  # unless it is formatted")
    commands += [shlex.join(mount_command(volume, juicefs, mount)) for mount in volume.mounts]
    return [*commands, f"# write {volume.declaration} from what the clients say"]


def request(options: argparse.Namespace) -> Volume:
    """The volume in the folder, with what is asked for now. Raises `VolumeError` when that contradicts its past."""
    volume = Volume.of(options.folder)
    asked = volume.request
    existed = bool(asked.mounts)
    for name, given in (("bucket", options.bucket), ("meta_url", options.meta_url)):
        before = getattr(asked, name)
        if existed and given is not None and given != before:
            raise VolumeError(
                f"The volume in {volume.folder} was made with --{name.replace('_', '-')} {before}, not {given}. "
                "Use another folder."
            )
        if given is not None:
            setattr(asked, name, given)
    if asked.meta_url is not None and asked.meta_url != without_password(asked.meta_url):
        raise VolumeError("--meta-url holds a password, which others could read. Give it in META_PASSWORD.")
    if asked.bucket is None and asked.meta_url is not None:
        raise VolumeError("--meta-url needs --bucket: other machines can't reach a gateway on this one.")
    wanted = [str(mount.resolve()) for mount in options.mount] or asked.mounts or [str(volume.folder / "mnt")]
    asked.mounts += [mount for mount in wanted if mount not in asked.mounts]
    return volume


def main(words: Sequence[str] | None = None) -> int:
    """Run `up.sh`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="up.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="holds servers, secrets, caches, logs, declaration")
    parser.add_argument(
        "--mount", metavar="PATH", type=Path, action="append", default=[],
        help="mount point; repeat it for several clients; default: DIR/mnt. Use the same path on every host",
    )  # fmt: skip
    parser.add_argument("--bucket", metavar="URL", help="bucket of an S3 store, for example https://HOST/BUCKET")
    parser.add_argument("--meta-url", metavar="URL", help="metadata engine, for example redis://HOST:6379/1")
    parser.add_argument("--install", action="store_true", help="install missing packages with apt-get (root)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none of them")
    options = parser.parse_args(words)

    def run() -> None:
        volume = request(options)
        if options.dry_run:
            print("\n".join(plan(volume, install=options.install)))
        else:
            up(volume, install=options.install)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
