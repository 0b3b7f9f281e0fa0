"""A stream whose client is killed in the middle of a write.

`python dying_stream.py RUN PUBLICATION`: in the given publication (counted from 1) it says `writing`, waits for a line
on standard input, and goes on writing. When the write fails it says `failed`, waits for another line, opens the pool
anew and publishes again. It ends when all is trained.
"""

from __future__ import annotations

import sys
import uuid
from contextlib import suppress
from pathlib import Path

from storage.columns import EncodedGroup
from storage.pool import Pool
from storage.refs import GroupRef
from tests.pipeline.mini_stream import MiniStream, run_session
from vime.errors import StorageError

IN_A_WRITE = "after_record"
"""One of straw's I/O phases: records are written, and not yet acknowledged."""


class DyingStream(MiniStream):
    """Counts publications and stops in the middle of one of them."""

    wanted = 0
    num_publications = 0

    def _publish(self, items: list[tuple[EncodedGroup, bytes]]) -> list[GroupRef]:
        type(self).num_publications += 1
        if self.num_publications != self.wanted:
            return super()._publish(items)
        assert isinstance(self._pool, Pool)
        root = self._pool.root
        pool = Pool.open(root, fault=self._stop_once)
        try:
            pool.publish_groups(items, submission_id=uuid.uuid4().hex)
        except StorageError as error:
            ask(f"failed {error.message.splitlines()[0]}")
        for cut_off in (pool, self._pool):
            with suppress(StorageError):  # its files are those of a mount that is gone
                cut_off.close()
        self._pool = Pool.open(root)
        return self._pool.publish_groups(items, submission_id=uuid.uuid4().hex)

    def _stop_once(self, phase: str) -> None:
        if phase == IN_A_WRITE and not getattr(self, "stopped", False):
            self.stopped = True
            ask("writing")


def ask(words: str) -> None:
    """Tell the test, and wait until it has done its part."""
    print(words, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    DyingStream.wanted = int(sys.argv[2])
    run_session(Path(sys.argv[1]), kind=DyingStream)
    print("done", flush=True)
