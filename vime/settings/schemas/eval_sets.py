"""The data sets of evaluation, from either flag, with every option filled in."""

from __future__ import annotations

from vime.settings.groups import Settings
from vime.settings.schemas.eval_config import EvalDataset, EvalOptions, eval_datasets, with_fallbacks

SINGLE_NAME = "aime"
"""Name of the data set when --eval-prompt-data is one path alone."""


def named_eval_files(settings: Settings) -> list[tuple[str, str]]:
    """Name and path of each data set of --eval-prompt-data; a path alone gets a name."""
    words = settings.evaluation.eval_prompt_data or ()
    if len(words) == 1:
        return [(SINGLE_NAME, words[0])]
    return list(zip(words[::2], words[1::2], strict=False))


def evaluation_sets(settings: Settings) -> tuple[EvalDataset, ...]:
    """Those of --eval-config, else those of --eval-prompt-data; none where there is no evaluation.

    Raises:
        SettingsError: as `read_eval_config`.
    """
    path = settings.evaluation.eval_config
    if path is not None:
        return eval_datasets(path, settings)
    return tuple(
        with_fallbacks(EvalDataset(name=name, path=data), EvalOptions(), settings)
        for name, data in named_eval_files(settings)
    )
