"""The text of single tokens, where a run's tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recovery.run_location import RunLocation
from vime.errors import SettingsError


def token_text(location: RunLocation, folder: Path | None = None) -> Callable[[int], str] | None:
    """Text of a token by `folder`'s tokenizer, or else by that of the run's `--hf-checkpoint`; None without one.

    Raises `SettingsError` for a given folder without a tokenizer.
    """
    named = location.settings.checkpoint.hf_checkpoint
    chosen = folder or (None if named is None else Path(named))
    if chosen is None or (folder is None and not chosen.is_dir()):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(chosen, local_files_only=True)
    except (OSError, ValueError) as error:
        if folder is None:
            return None
        raise SettingsError(f"--tokenizer {folder}: {error}.", next_step="Give a model's folder.") from error

    def text_of(token_id: int) -> str:
        text: str = tokenizer.decode([token_id])
        return text

    return text_of
