"""From a sample that was generated and scored, or that failed, to the line that is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.evaluation.records import EvalAnswer
from pipeline.failed_groups import Failure
from storage.files import make_folder, write_atomically
from vime.rollout.rewards import reward_value
from vime.utils.types import Sample


def answer_of(
    data_set: str, sample: Sample, *, attempt: int, source: str, reward_key: str | None, error: Exception | None
) -> EvalAnswer:
    """What came of a sample. With `error` it has no reward, whatever the sample says."""
    return EvalAnswer(
        data_set=data_set,
        prompt_number=sample.group_index or 0,
        attempt=attempt,
        source=source,
        prompt=sample.prompt,
        label=sample.label,
        response=sample.response,
        reward=None if error is not None else reward_value(sample, reward_key),
        details=sample.reward if isinstance(sample.reward, dict) else None,
        status=sample.status.value,
        prompt_tokens=sample.prompt_length,
        response_tokens=sample.response_length,
        policy_versions=policy_versions(sample),
        metadata=sample.metadata,
        failure="" if error is None else Failure([sample], error).reason,
        error="" if error is None else str(error),
    )


def policy_versions(sample: Sample) -> list[int]:
    """Versions that made tokens of a sample, ascending; empty when the engine, or who asked it, didn't tell."""
    known = {version for version, _, _ in sample.version_spans}
    return sorted(known or {int(version) for version in sample.weight_versions if version.isdecimal()})


def write_answers(path: Path, answers: Sequence[EvalAnswer]) -> None:
    """Write one JSON line for each; values that JSON doesn't know become text. Raises `StorageError`."""
    make_folder(path.parent)
    lines = [msgspec.json.encode(answer, enc_hook=_as_text) for answer in answers]
    write_atomically(path, b"".join(line + b"\n" for line in lines))


def _as_text(value: Any) -> str:
    return str(value)
