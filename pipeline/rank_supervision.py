"""Watches that the trainer's ranks get on, in jobs that have neither queue nor producers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.process_reports import ProcessReports
from pipeline.stages import StageBoard
from pipeline.supervision import Patience, StallRecord, Supervisor, write_stall
from pipeline.workers import Workers
from vime.settings.groups import QueueSettings


def supervise_ranks(patience: QueueSettings, workers: Workers, note: Callable[[str], None], stalls: Path) -> StageBoard:
    """From now on a job whose ranks don't get on says so, and ends after --stall-timeout; its stages are told here.

    `note` is told of a stall, which is kept in `stalls`, too. What is awaited must be `workers.guarded`.
    """
    board = StageBoard()

    def tell(record: StallRecord) -> None:
        note(f"No progress for {record.quiet_s:.0f} s: {record.words}.")
        write_stall(stalls, record)

    supervisor = Supervisor(
        board, ProcessReports(workers, [], [], dict), Patience(patience.stall_after, patience.stall_timeout), tell
    )
    workers.watch.add("supervisor", supervisor.run())
    return board
