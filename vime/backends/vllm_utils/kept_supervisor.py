"""The supervisor of an engine that outlives its driver; see `vime.backends.vllm_utils.lease`.

    python -m vime.backends.vllm_utils.kept_supervisor GRACE_SECONDS LEDGER CLAIM ID COMMAND [ARGUMENT ...]

It leaves its launcher at once: the process that was started notes the id of another one and ends, and that other one
belongs to nobody. Everything else is as in `vime.backends.vllm_utils.supervisor`. It imports the standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from vime.backends.vllm_utils.lease import KeptProcess, LeaseWatch, read_claim, write_process
from vime.backends.vllm_utils.supervisor import Supervisor, start_time

_LOOK_S = 1.0


class KeptSupervisor(Supervisor):
    """Ends its engine when the lease says so."""

    def __init__(self, command: list[str], grace_s: float, ledger: Path, watch: LeaseWatch) -> None:
        super().__init__(command, grace_s, ledger)
        self._watch, self._looked_at = watch, 0.0

    def is_wanted(self) -> bool:
        """Whether the engine may go on; looked at once a second."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return True
        self._looked_at = time.monotonic()
        why = self._watch.why_end()
        if why is not None:
            print(f"The engine ends: {why}.", flush=True)
        return why is None


def main(argv: list[str]) -> int:
    """Start the engine in a process of its own and return, there when the engine has ended, here at once."""
    grace_s, ledger, claim_file, claim_id, *command = argv
    claim = Path(claim_file)
    other = os.fork()
    if other:
        write_process(claim, KeptProcess(claim_id, other, start_time(other)))
        return 0
    status = KeptSupervisor(command, float(grace_s), Path(ledger), LeaseWatch(claim, claim_id)).run()
    found = read_claim(claim)
    if found is not None and found.id == claim_id:
        write_process(claim, KeptProcess(claim_id, os.getpid(), None, status))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
