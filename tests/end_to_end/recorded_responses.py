"""A generate function that gives each sample the response that it had in an earlier run."""
# ruff: noqa: ARG001 - the documented signature

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from storage.debug_samples import read_pt
from vime.utils.types import Sample

FOLDER_VARIABLE = "VIME_TEST_RECORDED_RESPONSES"
"""Folder of the files that --save-debug-rollout-data wrote in that run."""


@functools.cache
def recorded(folder: Path) -> dict[int | None, Sample]:
    return {sample.index: sample for path in sorted(folder.glob("*.pt")) for sample in read_pt(path)}


async def play(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    then = recorded(Path(os.environ[FOLDER_VARIABLE]))[sample.index]
    assert then.prompt == sample.prompt
    sample.tokens, sample.response, sample.response_length = then.tokens, then.response, then.response_length
    sample.rollout_log_probs, sample.version_spans = then.rollout_log_probs, then.version_spans
    sample.status = then.status
    return sample
