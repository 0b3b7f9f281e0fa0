"""An index of a run's samples in SQLite, so that filters and searches over many are quick.

It lies in a folder of the viewer's own, never in the run. Text is cut to its beginning and end, see `MOST_CHARACTERS`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from vime.errors import SettingsError

MOST_CHARACTERS = 2000
"""Of a prompt or a response: half from its beginning, half from its end."""
BUSY_S = 30.0
"""How long a reader waits for a writer, and the other way round."""
SHORTEST_SEARCH = 3
"""Characters; the index is one of trigrams."""

Order = Literal["ascending", "descending"]


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted sample."""

    sample_index: int
    group_index: int
    member: int
    state: str
    """Of its group: pending, trained or reclaimed."""
    source: str
    status: str
    reward: float | None
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    min_version: int | None
    max_version: int | None
    prompt: str
    response: str


class Planned(msgspec.Struct, frozen=True):
    """What the plan that counts says of a sample."""

    sample_index: int
    rollout: int
    advantage: float
    age_versions: int


NUMBERS = (
    "sample_index", "group_index", "member", "reward", "advantage", "mean_gap", "rollout", "age_versions",
    "prompt_tokens", "response_tokens", "trained_tokens", "min_version", "max_version",
)  # fmt: skip
WORDS = ("state", "source", "status")
COLUMNS = (*NUMBERS, *WORDS)
"""What can be filtered and ordered by."""
SHOWN = (*COLUMNS, "prompt", "response")

_COMPARISONS = {
    "equals": "{} = ?", "notEqual": "{} IS NOT ?", "greaterThan": "{} > ?", "greaterThanOrEqual": "{} >= ?",
    "lessThan": "{} < ?", "lessThanOrEqual": "{} <= ?", "inRange": "{} BETWEEN ? AND ?", "blank": "{} IS NULL",
    "notBlank": "{} IS NOT NULL", "contains": "instr({}, ?)", "notContains": "NOT instr({}, ?)",
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """One filter of a column."""

    column: str
    comparison: str
    values: tuple[float | str, ...] = ()


@dataclass(frozen=True)
class SampleQuery:
    """Which samples, and in which order."""

    text: str = ""
    """Must occur in the prompt or the response, in either case of letters."""
    conditions: tuple[Condition, ...] = ()
    order: tuple[tuple[str, Order], ...] = field(default=(("sample_index", "descending"),))
    offset: int = 0
    limit: int = 100


@dataclass(frozen=True)
class SamplePage:
    """A stretch of the samples that match."""

    rows: list[dict[str, Any]]
    """By name of the column."""
    num_matching: int


class SampleIndex:
    """Any number of threads may read while one writes. Use with `with`, or close it."""

    def __init__(self, path: Path) -> None:
        """Make the index in a new file."""
        self.path = path
        self._lock = threading.Lock()
        self._writer = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = OFF")
        self._writer.executescript(_SCHEMA)

    def add(self, rows: Iterable[SampleRow]) -> None:
        """Add samples that are not there yet."""
        values = [msgspec.structs.asdict(row) for row in rows]
        for value in values:
            value["prompt"], value["response"] = cut(value["prompt"]), cut(value["response"])
        names = [name for name in SampleRow.__struct_fields__ if name != "prompt"]
        places = ", ".join(f":{name}" for name in names)
        with self._writing() as connection:
            connection.executemany("INSERT OR IGNORE INTO prompts VALUES (:group_index, :prompt)", values)
            connection.executemany(f"INSERT OR IGNORE INTO samples ({', '.join(names)}) VALUES ({places})", values)

    def plan(self, planned: Iterable[Planned]) -> None:
        """Note what plans say."""
        with self._writing() as connection:
            connection.executemany(
                "UPDATE samples SET rollout = :rollout, advantage = :advantage, age_versions = :age_versions "
                "WHERE sample_index = :sample_index",
                [msgspec.structs.asdict(entry) for entry in planned],
            )

    def set_mean_gaps(self, gaps: Mapping[int, float]) -> None:
        """Note how far the trainer's log-probabilities are from the sampler's, by sample."""
        with self._writing() as connection:
            connection.executemany(
                "UPDATE samples SET mean_gap = ? WHERE sample_index = ?", [(gap, s) for s, gap in gaps.items()]
            )

    def set_states(self, states: Mapping[int, str]) -> None:
        """Note the state of groups, by index."""
        with self._writing() as connection:
            connection.executemany(
                "UPDATE samples SET state = ? WHERE group_index = ?", [(s, g) for g, s in states.items()]
            )

    def forget_plans(self) -> None:
        """After a resume: what earlier plans said, and the steps after them, no longer counts."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE samples SET rollout = NULL, advantage = NULL, age_versions = NULL, mean_gap = NULL"
            )

    def __len__(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT count(*) FROM samples").fetchone()[0])

    def page(self, query: SampleQuery) -> SamplePage:
        """The samples that match. Raises `SettingsError` for a column or a comparison that there is none of."""
        where, values = _where(query)
        order = ", ".join(
            f"{_column(name)} {'DESC' if direction == 'descending' else 'ASC'}" for name, direction in query.order
        )
        with self._reading() as connection:
            (num_matching,) = connection.execute(f"SELECT count(*) FROM samples {where}", values).fetchone()
            found = connection.execute(
                f"SELECT {', '.join(COLUMNS)}, prompt, response FROM samples JOIN prompts USING (group_index) {where} "
                f"ORDER BY {order or 'sample_index DESC'} LIMIT ? OFFSET ?",
                [*values, query.limit, query.offset],
            )
            return SamplePage([dict(zip(SHOWN, row, strict=True)) for row in found], num_matching)

    def close(self) -> None:
        """Close the file; no thread may use the index any more."""
        self._writer.close()

    def __enter__(self) -> SampleIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._writer:
            yield self._writer

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of this call: a server answers each request in a thread of its own."""
        with closing(sqlite3.connect(self.path, timeout=BUSY_S)) as connection:
            yield connection


def cut(text: str) -> str:
    """A text with its middle left out where it is long."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _where(query: SampleQuery) -> tuple[str, list[Any]]:
    parts: list[str] = []
    values: list[Any] = []
    if query.text:
        if len(query.text) < SHORTEST_SEARCH:
            raise SettingsError(
                f"The search is for {query.text!r}, needed: at least {SHORTEST_SEARCH} characters.",
                next_step="Type more of it.",
            )
        parts.append(_OCCURS)
        values += ['"' + query.text.replace('"', '""') + '"'] * 2
    for condition in query.conditions:
        pattern = _COMPARISONS.get(condition.comparison)
        if pattern is None or pattern.count("?") != len(condition.values):
            raise SettingsError(
                f"A filter of {condition.column} has comparison {condition.comparison!r} with "
                f"{len(condition.values)} values, allowed: {', '.join(_COMPARISONS)}."
            )
        parts.append(pattern.format(_column(condition.column)))
        values += condition.values
    return ("WHERE " + " AND ".join(parts) if parts else ""), values


def _column(name: str) -> str:
    if name not in COLUMNS:
        raise SettingsError(f"Samples have no column {name!r}, allowed: {', '.join(COLUMNS)}.")
    return name


_OCCURS = """sample_index IN (
    SELECT rowid FROM response_words WHERE response_words MATCH ?
    UNION SELECT sample_index FROM samples
    WHERE group_index IN (SELECT rowid FROM prompt_words WHERE prompt_words MATCH ?)
)"""

_SCHEMA = """
CREATE TABLE prompts (group_index INTEGER PRIMARY KEY, prompt TEXT);
CREATE TABLE samples (
    sample_index INTEGER PRIMARY KEY, group_index INTEGER, member INTEGER, state TEXT, source TEXT, status TEXT,
    reward REAL, advantage REAL, mean_gap REAL, rollout INTEGER, age_versions INTEGER, prompt_tokens INTEGER,
    response_tokens INTEGER, trained_tokens INTEGER, min_version INTEGER, max_version INTEGER, response TEXT
);
CREATE INDEX by_group ON samples (group_index);
CREATE VIRTUAL TABLE prompt_words USING fts5 (
    prompt, content = 'prompts', content_rowid = 'group_index', tokenize = 'trigram'
);
CREATE VIRTUAL TABLE response_words USING fts5 (
    response, content = 'samples', content_rowid = 'sample_index', tokenize = 'trigram'
);
CREATE TRIGGER prompt_added AFTER INSERT ON prompts BEGIN
    INSERT INTO prompt_words (rowid, prompt) VALUES (new.group_index, new.prompt);
END;
CREATE TRIGGER sample_added AFTER INSERT ON samples BEGIN
    INSERT INTO response_words (rowid, response) VALUES (new.sample_index, new.response);
END;
"""
