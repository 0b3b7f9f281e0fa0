"""--save-debug-train-data: what one rank trains on in a rollout batch, as it reaches the objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.debug_samples import plain, write_plain
from vime.data.batch import PackedMicrobatch


def write_train_data(template: str, rank: int, rollout_id: int, steps: Sequence[Sequence[PackedMicrobatch]]) -> None:
    """Write `{"rollout_id", "rank", "steps"}` as a `.pt` file of plain types and tensors.

    `steps` is a list for each optimizer step of a dict for each microbatch, with the fields of `PackedMicrobatch` that
    are there; shapes and dtypes are those of that class.
    """
    content = [[_fields(microbatch) for microbatch in step] for step in steps]
    path = Path(template.format(rollout_id=rollout_id, rank=rank)).absolute()
    write_plain(path, {"rollout_id": rollout_id, "rank": rank, "steps": content})


def _fields(microbatch: PackedMicrobatch) -> dict[str, Any]:
    values = dataclasses.asdict(microbatch)
    return {name: plain(value, name) for name, value in values.items() if value is not None}
