"""The documented import path of debug archives."""

from storage.archive import RolloutArchive

__all__ = ["RolloutArchive"]
