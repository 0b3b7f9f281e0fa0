"""Reads one run again and again in a thread, so that pages answer from memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipeline.alarm import Alarm
from pipeline.alarms import find_alarms
from pipeline.dead_list import DeadList, list_dead
from pipeline.incidents import Incident, open_incidents
from pipeline.supervision import StallRecord
from recovery import queue_report
from recovery.branch_line import BranchLine
from recovery.commit import commit_path, committed_rollouts
from recovery.queue_report import HistoryReport, StatusReport
from recovery.run_location import RunLocation
from storage.json_lines import read_json_lines
from storage.pool import Pool
from storage.queue_view import QueueView
from vime.counted import counted
from vime.errors import VimeError
from vime.outputs import passing_folder
from vime.view.index_builder import IndexBuilder
from vime.view.metrics import MetricsFile, RunMetrics
from vime.view.sample_index import SampleIndex

INTERVAL_S = 1.0
REST = 4.0
"""Times as long as reading the queue took, nothing is read of it."""
MOST_LETTERS = 500


@dataclass(frozen=True)
class RunState:
    """What is known of a run at one moment."""

    serial: int = 0
    """Rises with every change."""
    is_running: bool = False
    metrics: RunMetrics = field(default_factory=RunMetrics)
    status: StatusReport | None = None
    """None where the queue is not on the disk, or wasn't read yet."""
    history: HistoryReport | None = None
    dead: DeadList | None = None
    commits: dict[int, float] = field(default_factory=dict)
    """Rollout -> Unix time of its commit record."""
    num_indexed: int = 0
    """Groups whose samples can be searched."""
    samples_serial: int = 0
    """Rises when something in the index of samples may have changed."""
    stalls: tuple[StallRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()
    metrics_problem: str = ""
    queue_problem: str = ""
    samples_problem: str = ""

    @property
    def problems(self) -> list[str]:
        """What can't be read, a sentence each."""
        said = (self.metrics_problem, self.queue_problem, self.samples_problem, *self.metrics.problems)
        return [text for text in dict.fromkeys(said) if text]

    @property
    def stall(self) -> StallRecord | None:
        """The newest stall, unless a batch was trained since."""
        steps = self.metrics.steps
        newest = self.stalls[-1] if self.stalls else None
        return newest if newest is not None and (not steps or steps[-1].time_s < newest.time_s) else None

    @property
    def newest_messages(self) -> dict[str, str]:
        """Reason -> message of its newest dead letter."""
        letters = [] if self.dead is None else self.dead.letters
        return {row.letter.reason: row.letter.message for row in reversed(letters)}

    @property
    def alarms(self) -> list[Alarm]:
        """What is wrong, most urgent first."""
        status, dead = self.status, self.dead
        letters = None if dead is None or not dead.reasons else {each.reason: each.num_letters for each in dead.reasons}
        return find_alarms(
            self.metrics.steps,
            incidents=open_incidents(self.incidents),
            stall=None if self.stall is None else (self.stall.quiet_s, self.stall.words),
            dead_letters=letters if status is None else status.dead_letters,
            messages=self.newest_messages,
            disk=None if status is None else (status.free_bytes, status.total_bytes),
        )


class RunWatch:
    """One run. Use with `with`, which reads metrics once and then goes on in three threads.

    Queue and samples have their own, since reading them the first time takes a while in a large run.
    """

    def __init__(self, location: RunLocation, name: str, index_folder: Path) -> None:
        """`index_folder` is where the index of samples goes; it has to exist."""
        self.location, self.name = location, name
        self.state = RunState()
        self.index = SampleIndex(index_folder / f"{name.replace('/', '_')}.sqlite")
        self._metrics = MetricsFile(location.root / "metrics.jsonl")
        self._builder = IndexBuilder(self.index, location.token_log)
        self._queue_files: object = None
        self._sample_files: object = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(refresh,), name=f"{refresh.__name__} {name}", daemon=True)
            for refresh in (self.refresh_metrics, self.refresh_queue, self.refresh_samples)
        ]

    def refresh_metrics(self) -> None:
        """Read the new lines of metrics, and whether the run is running."""
        problem = ""
        try:
            metrics = self._metrics.refresh()
            root = self.location.root
            self._update(
                stalls=read_json_lines(root / "stalls.jsonl", StallRecord, "a stall"),
                incidents=read_json_lines(root / "incidents.jsonl", Incident, "an incident"),
            )
        except VimeError as error:
            metrics, problem = self._metrics.metrics, str(error)
        if metrics.serial != self.state.metrics.serial:
            self._update(metrics=replace(metrics, steps=list(metrics.steps)))
        self._update(metrics_problem=problem, is_running=self.location.driver() is not None)

    def refresh_queue(self) -> None:
        """Read the queue, dead letters and branches, where their files have changed."""
        files = _file_sizes(self.location)
        if files == self._queue_files:
            return
        try:
            self._update(dead=list_dead(self.location, reasons=(), groups=(), limit=MOST_LETTERS))
            if self.location.has_queue:
                self._update(
                    status=queue_report.status(self.location),
                    history=queue_report.history(self.location),
                    commits=_commit_times(self.location),
                )
        except (VimeError, OSError) as error:
            self._update(queue_problem=str(error))
            return
        self._update(queue_problem="")
        self._queue_files = files

    def refresh_samples(self) -> None:
        """Bring the index of samples up to date, where the queue's files have changed."""
        files = _file_sizes(self.location)
        if files == self._sample_files or not self.location.has_queue:
            return
        try:
            self._index_samples()
        except (VimeError, OSError) as error:
            self._update(samples_problem=str(error))
            return
        self._update(samples_problem=_unreadable(self._builder), samples_serial=self.state.samples_serial + 1)
        self._sample_files = files

    def close(self) -> None:
        """End the threads and the index."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.index.close()

    def __enter__(self) -> Self:
        self.refresh_metrics()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _repeat(self, refresh: Callable[[], None]) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            refresh()
            self._stop.wait(max(INTERVAL_S, REST * (time.monotonic() - began)))

    def _update(self, **changes: Any) -> None:
        with self._lock:
            changed = replace(self.state, **changes)
            if changed != self.state:
                self.state = replace(changed, serial=self.state.serial + 1)

    def _index_samples(self) -> None:
        view = QueueView(self.location.pool)
        line = BranchLine(self.location.root, view.control_dir)
        with Pool.open(self.location.pool) as pool:
            self._builder.refresh(pool, view, line, self._goes_on)
        self._update(num_indexed=self._builder.num_groups)

    def _goes_on(self) -> bool:
        self._update(num_indexed=self._builder.num_groups)
        return not self._stop.is_set()


def _unreadable(builder: IndexBuilder) -> str:
    """What of the samples can't be read, "" where all can."""
    groups, words = builder.unreadable, list(builder.damaged[:1])
    if groups:
        first = next(iter(groups))
        words.append(f"{counted(len(groups), 'group')} can't be shown; the first is group {first}: {groups[first]}")
    return " ".join(words)


def _commit_times(location: RunLocation) -> dict[int, float]:
    """Of all branches; where several committed the same rollout, the last one counts."""
    times: dict[int, float] = {}
    line = BranchLine(location.root, location.pool / "vime")
    for branch in line.branches:
        folder = location.root / branch.directory
        for rollout in committed_rollouts(folder):
            times[rollout] = commit_path(folder, rollout).stat().st_mtime
    return times


def _file_sizes(location: RunLocation) -> object:
    """Equal as long as nothing was appended to the files that pages are made of."""
    pool = location.pool
    paths = [
        *location.dead_letters.glob("*.jsonl"),
        *(pool / "queues").glob("*/control/journal.log"),
        *(pool / "vime").glob("*.json*"),
        *(location.root / "rollout").glob("*.json*"),
    ]
    found = {}
    for path in paths:
        try:
            about = path.stat()
        except OSError:
            continue  # replaced since the folder was listed
        found[str(path)] = (about.st_size, about.st_mtime_ns)
    return found


def read_once(location: RunLocation) -> RunState:
    """The state of a run now, without an index of its samples.

    Raises `StorageError` where no temporary folder can be made.
    """
    with passing_folder("vime-report-") as folder:
        watch = RunWatch(location, "report", folder)
        try:
            watch.refresh_metrics()
            watch.refresh_queue()
            return watch.state
        finally:
            watch.close()
