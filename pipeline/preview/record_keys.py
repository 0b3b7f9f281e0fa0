"""Keys of records that flags name and no record has."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.preview.rehearsal import first_prompts
from vime.data.prompt_stream import PromptStream
from vime.settings.groups import Settings
from vime.settings.groups.data import DataSettings

NUM_LOOKED_AT = 256
_TOOLS = "tools"
"""Where a record's tools go among its metadata."""


def absent_keys(settings: Settings, source: PromptStream) -> list[str]:
    """A warning for each key other than its flag's default that none of the first records has.

    Such keys may be absent, unlike that of the prompt and of the label. A user's own source reads none.
    """
    data, default = settings.data, DataSettings()
    if data.data_source_path is not None:
        return []
    named = {"--metadata-key": data.metadata_key, "--tool-key": data.tool_key}
    named |= {f"--multimodal-keys {kind}": key for kind, key in (data.multimodal_keys or {}).items()}
    asked = {flag: key for flag, key in named.items() if key not in (default.metadata_key, default.tool_key)}
    if not asked:
        return []
    tasks = first_prompts(source, NUM_LOOKED_AT)
    found = {part for task in tasks for part in _parts(task.metadata, task.media)}
    return [
        f"{flag} {key}: none of the first {len(tasks)} records has it. Correct it or leave it out."
        for flag, key in asked.items()
        if flag not in found
    ]


def _parts(metadata: dict[str, object], media: dict[str, list[object]]) -> Iterator[str]:
    """Flags whose keys a record had."""
    if set(metadata) - {_TOOLS}:
        yield "--metadata-key"
    if _TOOLS in metadata:
        yield "--tool-key"
    yield from (f"--multimodal-keys {kind}" for kind in media)
