"""What a running JuiceFS client says of its own mount, and whether the queue may lie on it.

The client serves its settings as `.config` in the root of the mount (also with `--hide-internal`). They are what is in
force, whatever a unit file, a script or a declaration says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_SYSTEM = "fuse.juicefs"
DECLARED = {"direct_mount": True, "writeback": False, "open_cache": 0, "readdir_cache": False}
"""What a declaration must say, and the mount must be."""
CONFIG_NAMES = (".config", ".jfs.config")
"""The second with `--prefix-internal`."""
MAX_METADATA_CACHE_S = 1.0
"""straw waits up to 3.85 s for what another client has just written; the kernel must not hide it for longer."""
MAX_HEARTBEAT_S = 5.0
"""Locks of a dead client are freed after five heartbeats."""
_NANOSECONDS = 1e9


@dataclass(frozen=True)
class ClientOptions:
    """The options in force of one mount."""

    version: str
    volume_id: str
    session: int
    """Number of this client among those of the volume."""
    object_storage: str
    bucket: str
    trash_days: int
    writeback: bool
    """Data is acknowledged before it is uploaded."""
    kernel_writeback: bool
    """`-o writeback_cache`: the kernel holds writes back from the client."""
    read_only: bool
    open_cache_s: float
    readdir_cache: bool
    metadata_cache_s: float
    """Longest of the attribute, entry and folder entry caches."""
    heartbeat_s: float


def read_options(mount: Path) -> ClientOptions:
    """Ask the client behind the mount point `mount`.

    Raises:
        OSError: it doesn't answer: it was killed, or nothing is mounted.
        KeyError, TypeError, ValueError: it answers in another form (an unknown version).
    """
    path = next((mount / name for name in CONFIG_NAMES if (mount / name).exists()), mount / CONFIG_NAMES[0])
    config = json.loads(path.read_bytes())
    meta, volume = config["Meta"], config["Format"]
    caches = ("AttrTimeout", "EntryTimeout", "DirEntryTimeout", "NegEntryTimeout")
    return ClientOptions(
        version=str(config["Version"]),
        volume_id=str(volume["UUID"]),
        session=int(meta["Sid"]),
        object_storage=str(volume["Storage"]),
        bucket=str(volume["Bucket"]),
        trash_days=int(volume["TrashDays"]),
        writeback=bool(config["Chunk"]["Writeback"]),
        kernel_writeback=bool(config["FuseOpts"]["EnableWriteback"]),
        read_only=bool(meta["ReadOnly"]),
        open_cache_s=int(meta["OpenCache"]) / _NANOSECONDS,
        readdir_cache=bool(config["ReaddirCache"]),
        metadata_cache_s=max(int(config[name]) for name in caches) / _NANOSECONDS,
        heartbeat_s=int(meta["Heartbeat"]) / _NANOSECONDS,
    )


def unsafe_options(options: ClientOptions) -> list[str]:
    """Why the queue may not lie on this mount, one sentence part for each option; empty when it may."""
    rules = (
        (options.writeback, "writeback is on, allowed: off (data would be acknowledged before it is uploaded)"),
        (
            options.kernel_writeback,
            "the kernel's write-back cache (-o writeback_cache) is on, allowed: off (other hosts would not see what "
            "was appended)",
        ),
        (options.read_only, "it is read-only, allowed: writable"),
        (
            options.open_cache_s > 0,
            f"open-cache is {options.open_cache_s:g} s, allowed: 0 (other hosts' growing files would stay short)",
        ),
        (options.readdir_cache, "readdir-cache is on, allowed: off (other hosts' new files would stay hidden)"),
        (
            options.metadata_cache_s > MAX_METADATA_CACHE_S,
            f"attributes or entries are cached for {options.metadata_cache_s:g} s, allowed: at most "
            f"{MAX_METADATA_CACHE_S:g}",
        ),
    )
    return [words for is_broken, words in rules if is_broken]


def doubtful_options(options: ClientOptions) -> list[str]:
    """What makes failures worse than they need be, without losing data."""
    rules = (
        (
            options.heartbeat_s > MAX_HEARTBEAT_S,
            f"the heartbeat is {options.heartbeat_s:g} s, so locks of a dead client stay for about "
            f"{5 * options.heartbeat_s:.0f} s (mount with --heartbeat 2s)",
        ),
        (
            options.trash_days == 0,
            "trash-days is 0, so a reader on another host sees a replaced file vanish (`juicefs config META "
            "--trash-days 1`)",
        ),
    )
    return [words for is_so, words in rules if is_so]


def declared_otherwise(declaration: Mapping[str, Any], options: ClientOptions) -> list[str]:
    """Where the operator's declaration is not allowed, or not what the client says."""
    wrong = [
        f"the declaration says {key} {declaration.get(key)!r}, allowed: {allowed!r}"
        for key, allowed in DECLARED.items()
        if declaration.get(key) != allowed
    ]
    actual = declaration_of(options, "")
    return wrong + [
        f"{key} is declared {declaration.get(key)!r}, the client says {actual[key]!r}"
        for key in ("writeback", "open_cache", "readdir_cache", "client_version")
        if declaration.get(key) != actual[key]
    ]


def declaration_of(options: ClientOptions, durability: str) -> dict[str, Any]:
    """The declaration of a direct mount, from what its client says; `durability` says where data is kept."""
    whole = int(options.open_cache_s)
    return {
        "direct_mount": True,
        "writeback": options.writeback,
        "open_cache": whole if whole == options.open_cache_s else options.open_cache_s,
        "readdir_cache": options.readdir_cache,
        "client_version": options.version,
        "durability_description": durability,
    }
