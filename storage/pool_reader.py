"""A pool that is looked into while others write it."""

from __future__ import annotations

from storage.pool import Pool
from storage.straw_errors import translated


class PoolReader(Pool):
    """Reads payloads and leaves every byte on disk as it is; made by `PoolReader.open`.

    straw makes a writer's files when a store publishes, and also when it is closed; so this store is never closed.
    """

    def close(self) -> None:
        """Free the reader."""
        self._closed = True
        with translated("close the pool's reader", self.root):
            self._reader.close()
        self._exit.pop_all()
