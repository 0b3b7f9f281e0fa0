"""The tokenizer of a checkpoint folder; one that can't be loaded is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.errors import ModelError, reason_of

FILE = "tokenizer.json"
_NEXT_STEP = "Restore the tokenizer's files in --hf-checkpoint."


def load_tokenizer(checkpoint: str | None) -> Any:
    """The tokenizer of transformers. Raises `ModelError` where the folder has none, or a damaged one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except Exception as error:  # the library raises Exception itself for a file that isn't one of its own
        raise ModelError(
            f"--hf-checkpoint {checkpoint}: its tokenizer can't be loaded: {reason_of(error).splitlines()[0]}.",
            next_step=_NEXT_STEP,
        ) from error


def read_tokenizer_file(checkpoint: Path) -> Any:
    """The tokenizer in the folder's `tokenizer.json`, without loading transformers; None where there is no such file.

    Raises `ModelError` for a damaged one.
    """
    path = checkpoint / FILE
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # as above
        raise ModelError(f"{path} can't be read: {reason_of(error)}.", next_step=_NEXT_STEP) from error
