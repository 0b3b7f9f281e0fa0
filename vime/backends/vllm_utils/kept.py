"""An engine's process that outlives whoever started it, and is found again by another one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vime.backends.vllm_utils.lease import (
    OUTLIVES_DRIVER_ENV,
    Claim,
    KeptProcess,
    claim_path,
    end_claimed,
    here,
    read_claim,
    read_process,
    write_claim,
)
from vime.errors import EngineStartError

_SUPERVISOR = "vime.backends.vllm_utils.kept_supervisor"
_LAUNCH_S = 60.0
_UNKNOWN_STATUS = 137
"""Of an engine whose supervisor was killed."""


@dataclass(frozen=True)
class Keeping:
    """Where the claims of a run's kept engines lie, and which of them is this one's."""

    folder: Path
    name: str
    session: str

    @property
    def claim(self) -> Path:
        return claim_path(self.folder, self.name)


class KeptEngine:
    """The process of a kept engine."""

    def __init__(self, path: Path, claim: Claim, process: KeptProcess) -> None:
        self._path, self.claim, self._process = path, claim, process

    @classmethod
    def start(
        cls,
        keeping: Keeping,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        stop_grace_s: float,
        address: tuple[str, int],
        settings: Mapping[str, str],
    ) -> Self:
        """Start a command that will listen at `address`; whoever had the claim before ends by itself within seconds.

        Raises:
            EngineStartError: its supervisor could not be started.
        """
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".previous.log"))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        claim_id = uuid.uuid4().hex
        ledger = log_path.with_suffix(f".{claim_id}.segments")
        claim = Claim(claim_id, *address, here(), stop_grace_s, str(ledger), dict(settings))
        write_claim(keeping.claim, claim)
        with log_path.open("wb") as log:
            launched = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    _SUPERVISOR,
                    str(stop_grace_s),
                    str(ledger),
                    str(keeping.claim),
                    claim.id,
                    *argv,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(env) | {OUTLIVES_DRIVER_ENV: "1"},
                start_new_session=True,
                timeout=_LAUNCH_S,
                check=False,
            )
        process = read_process(keeping.claim, claim.id)
        if launched.returncode or process is None:
            raise EngineStartError(
                f"The supervisor of {keeping.name} ended with status {launched.returncode}.",
                next_step=f"Look at {log_path}.",
            )
        return cls(keeping.claim, claim, process)

    @classmethod
    def find(cls, keeping: Keeping) -> Self | None:
        """The engine that runs on this machine for this claim; None without one."""
        claim = read_claim(keeping.claim)
        process = None if claim is None else read_process(keeping.claim, claim.id)
        if claim is None or process is None or claim.place != here() or not process.runs:
            return None
        return cls(keeping.claim, claim, process)

    def differences(self, settings: Mapping[str, str]) -> list[str]:
        """What it was started from otherwise than these settings, in words."""
        had = self.claim.settings
        names = sorted({*had, *settings})
        return [
            f"{name} was {had.get(name, 'not set')}, is {settings.get(name, 'not set')}"
            for name in names
            if had.get(name) != settings.get(name)
        ]

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while the engine runs, its exit status afterwards."""
        if self._process.runs:
            return None
        ended = read_process(self._path, self.claim.id)
        return _UNKNOWN_STATUS if ended is None or ended.status is None else ended.status

    def stop(self) -> None:
        """End the engine and give the claim up, unless another one has it. Safe to call twice."""
        found = read_claim(self._path)
        if found is not None and found.id == self.claim.id:
            end_claimed(self._path)
