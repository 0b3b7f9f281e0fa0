"""The resolved settings as readable JSON, for the run folder."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from vime.settings.groups import all_flags
from vime.settings.resolve import Resolved


def settings_record(resolved: Resolved) -> bytes:
    """JSON with every group's values, the flags passed on, and under `sources` where each flag's value comes from.

    Secrets appear as "***".
    """
    record: dict[str, Any] = dataclasses.asdict(resolved.settings)
    for field, (group, described) in all_flags().items():
        if described.secret and record[group][field] is not None:
            record[group][field] = "***"
    record["sources"] = {name: str(source) for name, source in resolved.sources.items()}
    return json.dumps(record, indent=1, sort_keys=True).encode()
