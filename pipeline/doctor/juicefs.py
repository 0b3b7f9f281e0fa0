"""The JuiceFS declaration against the mount itself: the kernel's mount table and the client's own `.config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, failed, passed, warned
from storage.mounts import MOUNT_TABLE, mount_of

NAME = "JuiceFS mount"
FILE_SYSTEM = "fuse.juicefs"
REQUIRED = {"direct_mount": True, "writeback": False, "open_cache": 0, "readdir_cache": False}
"""What the declaration must say, and the mount must be."""


def read_client_config(mount: Path) -> Mapping[str, Any]:
    """What the client says of itself, under the names of the declaration.

    Raises:
        OSError: it doesn't answer.
        KeyError, ValueError: another form (another version).
    """
    config = json.loads((mount / ".config").read_bytes())
    return {
        "client_version": str(config["Version"]),
        "writeback": bool(config["Chunk"]["Writeback"]),
        "open_cache": int(config["Meta"]["OpenCache"]),
        "readdir_cache": bool(config["ReaddirCache"]),
    }


def juicefs_mount(
    folder: Path,
    declaration: Mapping[str, Any] | None,
    table: str | None = None,
    read_config: Callable[[Path], Mapping[str, Any]] = read_client_config,
) -> Check:
    """Compare what the operator declares with what is mounted at `folder`."""
    if declaration is None:
        return failed(NAME, "No declaration is named.", "Give --rollout-storage-declaration FILE.")
    mount = mount_of(folder.resolve(), MOUNT_TABLE.read_text() if table is None else table)
    if mount is None or mount.file_system != FILE_SYSTEM:
        found = "no mount" if mount is None else f"{mount.file_system} (mounted at {mount.point})"
        return failed(
            NAME,
            f"{folder} lies on {found}, not on {FILE_SYSTEM}.",
            "Mount it, or use the local profile.",
        )
    wrong = [
        f"the declaration says {key} {declaration.get(key)!r}, allowed: {allowed!r}"
        for key, allowed in REQUIRED.items()
        if declaration.get(key) != allowed
    ]
    try:
        actual = read_config(mount.point)
    except (OSError, KeyError, ValueError) as error:
        return warned(
            NAME, f"{mount.point}: the client's .config can't be read ({error}).", "Check the mount options by hand."
        )
    wrong += [
        f"{key} is declared {declaration.get(key)!r}, the client says {value!r}"
        for key, value in actual.items()
        if declaration.get(key) != value
    ]
    if wrong:
        return failed(NAME, f"{mount.point}: {'; '.join(wrong)}.", "Mount it anew, and declare what is mounted.")
    return passed(NAME, f"{mount.point} is mounted as declared")
