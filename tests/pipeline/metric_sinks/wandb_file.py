"""Reads Weights & Biases' offline files: a log of checked chunks whose records its own library decodes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


@dataclass(frozen=True)
class OfflineRun:
    """One session's file."""

    run_id: str
    name: str
    rows: list[dict[str, float]]


def offline_run(path: Path) -> OfflineRun:
    """What the file says. The file and each chunk begin with 7 bytes; no chunk begins in a block's last 6."""
    run_id, name, rows = "", "", []
    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.HasField("run"):
            run_id, name = record.run.run_id, record.run.display_name
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return OfflineRun(run_id, name, rows)


def _records(content: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts = (b"" if kind in (FULL, FIRST) else parts) + content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield parts
