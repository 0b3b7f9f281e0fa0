"""Watches that a job gets on: that it says so where it doesn't, and ends after --stall-timeout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.process_reports import ProcessReports
from pipeline.process_watch import ProcessWatch
from pipeline.stages import StageBoard
from pipeline.supervision import Patience, Reporting, StallRecord, Supervisor, write_stall
from pipeline.workers import Workers
from vime.settings.groups import QueueSettings


def supervise(
    watch: ProcessWatch,
    board: StageBoard,
    reports: Reporting,
    queue: QueueSettings,
    tell: Callable[[StallRecord], None],
) -> None:
    """From now on `tell` is told of a stall in a stage of `board`, and what `watch` guards ends with one that stays."""
    supervisor = Supervisor(board, reports, Patience(queue.stall_after, queue.stall_timeout), tell)
    watch.add("supervisor", supervisor.run())


def supervise_ranks(queue: QueueSettings, workers: Workers, note: Callable[[str], None], stalls: Path) -> StageBoard:
    """As `supervise`, for a job that has neither queue nor producers; its stages are told to the board that returns.

    `note` is told of a stall, which is kept in `stalls`, too. What is awaited must be `workers.guarded`.
    """
    board = StageBoard()

    def tell(record: StallRecord) -> None:
        note(f"No progress for {record.quiet_s:.0f} s: {record.words}.")
        write_stall(stalls, record)

    supervise(workers.watch, board, ProcessReports(workers, [], [], dict), queue, tell)
    return board
