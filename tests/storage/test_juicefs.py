"""What a JuiceFS client says of its mount, which options are refused, and what a declaration may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.juicefs import (
    ClientOptions,
    declaration_of,
    declared_otherwise,
    doubtful_options,
    read_options,
    unsafe_options,
)

SAFE = ClientOptions(
    version="1.4.2",
    volume_id="v",
    session=3,
    object_storage="s3",
    bucket="http://b/v",
    trash_days=1,
    writeback=False,
    kernel_writeback=False,
    read_only=False,
    open_cache_s=0.0,
    readdir_cache=False,
    metadata_cache_s=1.0,
    heartbeat_s=2.0,
)


def client_config() -> dict[str, Any]:
    """The parts of `.config` that are read, as version 1.4.2 writes them."""
    return {
        "Meta": {"OpenCache": 0, "Heartbeat": 2000000000, "Sid": 3, "ReadOnly": False},
        "Format": {"UUID": "v", "Storage": "s3", "Bucket": "http://b/v", "TrashDays": 1},
        "Chunk": {"Writeback": False},
        "Version": "1.4.2",
        "AttrTimeout": 1000000000,
        "DirEntryTimeout": 1000000000,
        "NegEntryTimeout": 0,
        "EntryTimeout": 1000000000,
        "ReaddirCache": False,
        "FuseOpts": {"EnableWriteback": False},
    }


@pytest.mark.parametrize("name", [".config", ".jfs.config"])
def test_options_in_force_are_read_from_the_mount(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(client_config()))
    assert read_options(tmp_path) == SAFE


@pytest.mark.parametrize(
    ("group", "key", "value", "changed"),
    [
        ("Chunk", "Writeback", True, {"writeback": True}),
        ("FuseOpts", "EnableWriteback", True, {"kernel_writeback": True}),
        ("Meta", "ReadOnly", True, {"read_only": True}),
        ("Meta", "OpenCache", 5_500_000_000, {"open_cache_s": 5.5}),
        ("Meta", "Heartbeat", 12_000_000_000, {"heartbeat_s": 12.0}),
        ("Format", "TrashDays", 0, {"trash_days": 0}),
        (None, "ReaddirCache", True, {"readdir_cache": True}),
        (None, "NegEntryTimeout", 60_000_000_000, {"metadata_cache_s": 60.0}),
    ],
)
def test_each_option_is_read_from_its_place(
    tmp_path: Path, group: str | None, key: str, value: object, changed: dict[str, Any]
) -> None:
    config = client_config()
    (config if group is None else config[group])[key] = value
    (tmp_path / ".config").write_text(json.dumps(config))
    assert read_options(tmp_path) == replace(SAFE, **changed)


def test_unknown_form_is_not_taken_for_safe(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("{}")
    with pytest.raises(KeyError):
        read_options(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        read_options(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"writeback": True}, "writeback is on, allowed: off"),
        ({"kernel_writeback": True}, "-o writeback_cache"),
        ({"read_only": True}, "read-only"),
        ({"open_cache_s": 5.5}, "open-cache is 5.5 s, allowed: 0"),
        ({"readdir_cache": True}, "readdir-cache is on, allowed: off"),
        ({"metadata_cache_s": 60.0}, "cached for 60 s, allowed: at most 1"),
    ],
)
def test_option_that_loses_or_hides_data_is_unsafe(change: dict[str, Any], words: str) -> None:
    assert unsafe_options(SAFE) == []
    (found,) = unsafe_options(replace(SAFE, **change))
    assert words in found


def test_slow_heartbeat_and_missing_trash_are_doubtful_only() -> None:
    assert doubtful_options(SAFE) == []
    slow, bare = doubtful_options(replace(SAFE, heartbeat_s=12.0, trash_days=0))
    assert "locks of a dead client stay for about 60 s" in slow
    assert "--trash-days 1" in bare


def test_declaration_made_from_a_mount_agrees_with_it() -> None:
    made = declaration_of(SAFE, "redis and s3")
    assert declared_otherwise(made, SAFE) == []
    assert json.loads(json.dumps(made))["durability_description"] == "redis and s3"


@pytest.mark.parametrize(
    ("declared", "mounted", "words"),
    [
        ({}, {"writeback": True}, ["writeback is declared False, the client says True"]),
        ({}, {"open_cache_s": 5.0}, ["open_cache is declared 0, the client says 5"]),
        ({}, {"readdir_cache": True}, ["readdir_cache is declared False, the client says True"]),
        ({}, {"version": "1.5.0"}, ["client_version is declared '1.4.2', the client says '1.5.0'"]),
        ({"direct_mount": False}, {}, ["the declaration says direct_mount False, allowed: True"]),
        (
            {"writeback": True},
            {"writeback": True},
            ["the declaration says writeback True, allowed: False"],
        ),
    ],
)
def test_false_declaration_is_told(declared: dict[str, Any], mounted: dict[str, Any], words: list[str]) -> None:
    declaration = {**declaration_of(SAFE, "text"), **declared}
    assert declared_otherwise(declaration, replace(SAFE, **mounted)) == words
