"""--custom-eval-rollout-log-function-path: the user's own report of an evaluation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.evaluation.records import EvaluationRecord
from vime.settings.import_paths import load_function

logger = logging.getLogger(__name__)

FLAG = "--custom-eval-rollout-log-function-path"


class EvalLog:
    """Calls `f(rollout_id, args, data, extra_metrics)` when the results of an evaluation are there."""

    def __init__(self, path: str, hook_args: Any) -> None:
        self._path, self._hook_args = path, hook_args

    async def __call__(self, record: EvaluationRecord, data: Mapping[str, Mapping[str, Any]]) -> EvaluationRecord:
        """The record, marked when the function says by True that it has reported; what it raises is noted there."""

        def call() -> Any:
            function = load_function(FLAG, self._path)
            return function(record.evaluation, self._hook_args, data, dict(record.metrics))

        try:
            is_reported = await asyncio.to_thread(call) is True
        except Exception as error:  # the boundary to user code: a report must not end the run
            logger.exception("%s %s failed", FLAG, self._path)
            warning = f"{FLAG} {self._path} raised {type(error).__name__}: {error}"
            return msgspec.structs.replace(record, warnings=[*record.warnings, warning])
        return msgspec.structs.replace(record, is_reported=is_reported)
