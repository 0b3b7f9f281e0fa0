"""A rank of a replay that ends as a file in its scratch folder says: python -m tests.pipeline.replay.failing_rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from pipeline.replay.job import RankError, error_path, log_path


def main(scratch: Path, rank: int) -> int:
    match (scratch / f"rank_{rank}").read_text():
        case "tells":
            told = RankError("TrainerError", "loss is not finite (rank 0: samples 7).", "Look at these samples.")
            error_path(scratch, rank).write_bytes(msgspec.json.encode(told))
            return 1
        case "dies":
            log_path(scratch, rank).parent.mkdir(exist_ok=True)
            log_path(scratch, rank).write_text("the last words\n")
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
