"""A JuiceFS mount by what the kernel and its own client say, and against the operator's declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, failed, passed, warned
from storage.juicefs import (
    FILE_SYSTEM,
    ClientOptions,
    declared_otherwise,
    doubtful_options,
    read_options,
    unsafe_options,
)
from storage.mounts import MOUNT_TABLE, mount_of

NAME = "JuiceFS mount"


def juicefs_mount(
    folder: Path,
    declaration: Mapping[str, Any] | None,
    table: str | None = None,
    read: Callable[[Path], ClientOptions] = read_options,
) -> list[Check]:
    """Whether `folder` lies on a JuiceFS mount with safe options, and is declared as it is (where a declaration is
    given).
    """
    mount = mount_of(folder.resolve(), MOUNT_TABLE.read_text() if table is None else table)
    if mount is None or mount.file_system != FILE_SYSTEM:
        found = "no mount" if mount is None else f"{mount.file_system} (mounted at {mount.point})"
        return [
            failed(
                NAME, f"{folder} lies on {found}, not on {FILE_SYSTEM}.", "Mount it there, or use the local profile."
            )
        ]
    try:
        options = read(mount.point)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return [
            failed(
                NAME,
                f"{mount.point}: its client does not say how it is mounted ({error!r}).",
                "Mount it anew when the client is dead; else use the JuiceFS version that vime is tested with.",
            )
        ]
    wrong = unsafe_options(options) + ([] if declaration is None else declared_otherwise(declaration, options))
    if wrong:
        return [failed(NAME, f"{mount.point}: {'; '.join(wrong)}.", "Mount it anew, and declare what is mounted.")]
    how = "safely" if declaration is None else "as declared"
    doubts = [
        warned(NAME, f"{mount.point}: {words}.", "Correct it at the next mount.") for words in doubtful_options(options)
    ]
    return doubts or [passed(NAME, f"{mount.point} is mounted {how} ({options.version}, {options.object_storage})")]
