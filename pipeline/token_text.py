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
    try:
        return _decoder(chosen)
    except (OSError, ValueError) as error:
        if folder is None:
            return None
        raise SettingsError(f"--tokenizer {folder}: {error}.", next_step="Give a model's folder.") from error


def _decoder(folder: Path) -> Callable[[int], str]:
    """`tokenizers` alone where it reads the folder's file: transformers takes seconds to load."""
    file = folder / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(file.read_text())
        return lambda token_id: str(fast.decode([token_id], skip_special_tokens=False))
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda token_id: str(slow.decode([token_id]))
