"""Samples that have nothing but their prompt."""

from __future__ import annotations

import copy
import uuid

from vime.data.cursor import PromptTask
from vime.utils.types import Sample


def fresh_sample(prompt: PromptTask, member: int) -> Sample:
    """Member `member` of a group that starts from its prompt."""
    return Sample(
        group_index=prompt.group_index,
        index=prompt.first_sample_index + member,
        prompt=prompt.prompt,
        label=prompt.label,
        metadata=copy.deepcopy(prompt.metadata),
        session_id=uuid.uuid4().hex,
    )
