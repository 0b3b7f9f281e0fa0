"""A stand-in engine in a process of its own: python -m tests.support.standin_server PORT; it ends with SIGTERM."""

from __future__ import annotations

import signal
import sys

from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import VOCAB_SIZE

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    engine = StandinEngine(VOCAB_SIZE, 64)
    engine.port = int(sys.argv[1])
    engine.faults.step_s = 0.01
    with engine:
        print(f"serves at {engine.address}", flush=True)
        signal.sigwait({signal.SIGTERM})
