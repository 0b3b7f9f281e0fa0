"""From collected groups to what a rollout function returns, with the user's functions on whole rollouts."""

from __future__ import annotations

from typing import Any

from vime.errors import RunFailedError
from vime.rollout.base_types import RolloutFnTrainOutput
from vime.rollout.group_collector import Collected
from vime.settings.import_paths import load_function

SAMPLE_FILTER = "--rollout-sample-filter-path"
ALL_SAMPLES = "--rollout-all-samples-process-path"


def as_output(args: Any, collected: Collected, data_source: Any) -> RolloutFnTrainOutput:
    """The kept groups, after `f(args, groups)` marked samples not to train and `f(args, groups, data_source)` saw all.

    Raises `RunFailedError` when one of these functions raises.
    """
    kept = sorted(collected.kept, key=lambda group: group[0].index or 0)
    if args.rollout_sample_filter_path is not None:
        called(SAMPLE_FILTER, args.rollout_sample_filter_path, args, kept)
    if args.rollout_all_samples_process_path is not None:
        seen = sorted(collected.seen, key=lambda group: group[0].index or 0)
        called(ALL_SAMPLES, args.rollout_all_samples_process_path, args, seen, data_source)
    metrics = {
        f"rollout/dynamic_filter/drop_{reason.removeprefix('filter_')}": count
        for reason, count in sorted(collected.rejected.items())
    }
    return RolloutFnTrainOutput(kept, metrics)


def called(flag: str, path: str, *args: Any) -> None:
    """Call the user's function, whose result doesn't matter. Raises `RunFailedError` when it raises."""
    function = load_function(flag, path)
    try:
        function(*args)
    except Exception as error:  # the boundary to user code
        raise RunFailedError(
            f"{flag} {path} raised {type(error).__name__}: {error}.", next_step="Correct the function."
        ) from error
