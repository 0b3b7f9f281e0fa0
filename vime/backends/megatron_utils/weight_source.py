"""Where the weights of a model that isn't trained lie on disk. Reads names of files only; needs no framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vime.errors import RestoreError, SettingsError

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the number of the newest iteration, or `release`."""
METADATA = ".metadata"
"""Table of contents of a checkpoint in the `torch_dist` format."""
MODEL_FILE = "model_optim_rng.pt"
"""One rank's file of a checkpoint in the `torch` format, in a folder of its own."""


@dataclass(frozen=True)
class WeightSource:
    """A Hugging Face folder, or one iteration of a folder of Megatron checkpoints."""

    flag: str
    """The flag that named it, for messages."""
    directory: Path
    iteration: int | None = None
    """None takes the newest."""

    @property
    def is_hugging_face(self) -> bool:
        """Whether the folder holds safetensors files."""
        return any(self.directory.glob("*.safetensors"))

    @property
    def folder(self) -> Path:
        """The Hugging Face folder, or that of the one checkpoint. Raises `RestoreError` as `megatron_folder`."""
        return self.directory if self.is_hugging_face else self.megatron_folder()

    @property
    def holds_weights(self) -> bool:
        """Whether there is anything that looks like a checkpoint."""
        return self.is_hugging_face or (self.directory / TRACKER).is_file() or is_checkpoint(self.directory)

    def megatron_folder(self) -> Path:
        """Folder of the one checkpoint, which may be the source itself.

        Raises `RestoreError` when there is none, or when its number can't be read.
        """
        if self.iteration is None and is_checkpoint(self.directory):
            return self.directory
        if self.iteration is not None:
            return self._existing(self.directory / f"iter_{self.iteration:07d}")
        try:
            newest = (self.directory / TRACKER).read_text().strip()
        except OSError as error:
            raise RestoreError(
                f"{self.flag} {self.directory} holds neither *.safetensors nor {TRACKER}.",
                next_step="Give the folder of a Hugging Face model or of Megatron checkpoints.",
            ) from error
        if newest != "release" and not newest.isdecimal():
            raise RestoreError(
                f"{self.directory / TRACKER} holds {newest[:40]!r}, allowed: a number, or release.",
                next_step="Choose an iteration by number.",
            )
        return self._existing(self.directory / (newest if newest == "release" else f"iter_{int(newest):07d}"))

    def refuse_unused_iteration(self) -> None:
        """Raise `SettingsError` for the number of an iteration beside Hugging Face files, which have none."""
        if self.is_hugging_face and self.iteration is not None:
            raise SettingsError(
                f"{self.flag} {self.directory} is a Hugging Face folder, and iteration {self.iteration} of it is asked "
                "for, allowed: no iteration.",
                next_step="Leave out the step, or give a folder of Megatron checkpoints.",
            )

    def _existing(self, folder: Path) -> Path:
        if not folder.is_dir():
            found = sorted(path.name for path in self.directory.glob("iter_*"))
            listed = ", ".join(found[-4:]) or "no checkpoint"
            raise RestoreError(
                f"{self.flag}: {folder} doesn't exist, found: {listed}.", next_step="Choose an iteration that is there."
            )
        return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder itself is one Megatron checkpoint."""
    return (folder / METADATA).is_file() or any(folder.glob(f"mp_rank_*/{MODEL_FILE}"))
