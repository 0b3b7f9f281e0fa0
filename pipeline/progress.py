"""What the user sees of a running job: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.alarm import Alarm
from vime.counted import counted

PLAIN_INTERVAL_S = 2.0
IDLE_MARGIN = 0.05
"""Idle shares closer than this count as balanced."""
BOTH_IDLE_SHARE = 0.25
"""Of the time in which trainer and engines must have been idle at once, from which on neither is the bottleneck."""
REWARD_SHARE = 0.5
"""Of the samples' time, from which on the reward is what the trainer waits for."""
ROUTES_WORDS = "Routes were replayed"
"""How the alarm of a batch about its routes begins."""


class StepRecord(msgspec.Struct, frozen=True):
    """One line of `metrics.jsonl`: what happened in one rollout batch. Shares are of wall time since the start."""

    branch: str
    rollout_id: int
    num_rollout: int
    policy_version: int
    time_s: float
    """Unix time."""
    reward_mean: float
    reward_std: float
    signal_share: float
    """Share of groups whose members' rewards differ."""
    response_tokens_mean: float
    truncated_share: float
    staleness_mean: float
    staleness_max: int
    trained_tokens_per_s: float
    generated_tokens_per_s: float
    wait_s: float
    train_s: float
    publish_s: float
    pause_s: float
    update_weights_wire_bytes: int
    update_weights_density: float
    step_s: float
    trainer_idle_share: float
    generator_idle_share: float
    generated: int
    trained: int
    pending: int
    in_flight: int
    dropped: dict[str, int]
    spanning_samples: int
    """Samples of this session with tokens of more than one policy version."""
    groups_aborted: int
    failed_samples: dict[str, int]
    """Reason -> samples of this session that failed, also those whose group was tried again."""
    reward_by_source: dict[str, float]
    """Source of the prompt (`metadata["source_name"]`) -> mean reward of its samples in the batch."""
    train: dict[str, float]
    """The trainer's own metrics: loss, pg_clipfrac, ppo_kl, entropy, grad_norm, lr, ..."""
    reports: dict[str, float] = {}
    """What `--log-passrate` (`pass@k`), `--log-correct-samples` (`correct/...`), `--log-multi-turn` (`multi_turn/...`)
    and `--log-reward-category` (`error_cat/...`) ask for."""
    alarms: list[str] = []
    """What is wrong with this batch though it was trained: a sentence each."""
    publication_s: float = 0.0
    """Seconds that the publication took, of which the trainer may have waited for none; 0 when there was none."""
    drifted_tokens: int = 0
    """Sampled tokens that a generate function replaced in this session; their samples were set aside."""
    response_tokens_median: float = 0.0
    """Median response length of the batch's samples."""
    response_tokens_min: int = 0
    response_tokens_max: int = 0
    zero_std: dict[str, int] = {}
    """Reward, rounded to one decimal -> groups of the batch whose members all got the same, this one."""
    prefix_cache_hit_rate: float = 0.0
    """Prompt tokens that engines had in their prefix cache, of all in requests for this session's samples."""
    stale_prefix_share: float = 0.0
    """Since the batch before, the share of prompt tokens that came from a prefix cache that may hold what older weights
    computed; 0 with `--prefix-cache-salt version`, or where each publication flushes."""
    reward_time_share: float = 0.0
    """Since the batch before, the share of the samples' time that they were in the reward, not generated."""
    reward: str = ""
    """What scores the samples."""
    standing_alarms: list[Alarm] = []
    """What is wrong with the run after this batch: each with name, text, what to do, and level."""
    alarm_levels: dict[str, float] = {}
    """Name of a standing alarm -> how many times past its threshold."""
    unwritten: list[str] = []
    """Records beside the run that lack batches of this session, since they can't be written: a sentence each."""
    sample_metrics: dict[str, float] = {}
    """What else is known of the batch's samples, by the names of its series; listed below."""


def bottleneck(
    trainer_idle_share: float, generator_idle_share: float, reward_time_share: float = 0.0, reward: str = ""
) -> str:
    """One sentence that names the slower side; the reward, where samples spent most of their time in it.

    Shares that add up to more than all of the time overlap: then both sides waited for something else.
    """
    trainer, generator = f"{trainer_idle_share:.0%}", f"{generator_idle_share:.0%}"
    if reward_time_share > REWARD_SHARE and trainer_idle_share > REWARD_SHARE:
        return (
            f"The reward is the bottleneck: samples spent {reward_time_share:.0%} of their time in {reward}, while the "
            f"trainer waited {trainer} of the time and the engines stood idle {generator}."
        )
    both_idle_share = trainer_idle_share + generator_idle_share - 1.0
    if both_idle_share >= BOTH_IDLE_SHARE:
        return (
            f"Neither side is the bottleneck: the trainer idled {trainer} and the engines {generator} of the time, so "
            f"for {both_idle_share:.0%} of it or more both waited: for failing groups that are tried again, for "
            "rewards, or for weights on their way."
        )
    if trainer_idle_share > generator_idle_share + IDLE_MARGIN:
        return f"Generation is the bottleneck: the trainer waited {trainer} of the time for samples."
    if generator_idle_share > trainer_idle_share + IDLE_MARGIN:
        return f"Training is the bottleneck: the engines stood idle {generator} of the time."
    return f"Both sides keep pace: the trainer idled {trainer}, the engines {generator} of the time."


def stopped(done_rollouts: int, num_rollout: int) -> str:
    """The last line of a session that ends before its last rollout."""
    return f"Stopped after {done_rollouts} of {num_rollout} rollouts. To go on, run the same command again."


def finished(num_rollout: int, run: Path) -> str:
    """The last line of the session that trains the last rollout."""
    return (
        f"Trained and committed: {counted(num_rollout, 'rollout')}. `vime view {run}` shows the run, "
        f"`vime convert {run} FOLDER --to hf` writes its model."
    )


class ProgressView:
    """Prints notes and the newest step. Use with `with`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._last_plain, self._last_waiting = 0.0, ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, markup=False)
        sys.stdout.flush()

    def waiting(self, line: str) -> None:
        """What the run waits for; replaced by the next one in a terminal, at most one every 2 s elsewhere."""
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif line != self._last_waiting and time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain, self._last_waiting = time.monotonic(), line
            self.note(line)

    def stage(self, line: str) -> None:
        """What the run begins; replaced by what comes next in a terminal, a line that stays elsewhere."""
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        else:
            self.note(line)

    def step(self, record: StepRecord) -> None:
        """The newest step."""
        if self._live is not None:
            self._live.update(step_table(record), refresh=True)
        else:
            self.note(step_line(record))


def step_line(record: StepRecord) -> str:
    """A step as one plain line."""
    return (
        f"step {record.rollout_id + 1}/{record.num_rollout} (rollout {record.rollout_id})  "
        f"reward {record.reward_mean:.3f}  "
        f"staleness {record.staleness_mean:.1f} max {record.staleness_max}  "
        f"tok/s generated {record.generated_tokens_per_s:.0f} trained {record.trained_tokens_per_s:.0f}  "
        f"pending {record.pending} in flight {record.in_flight} dropped {sum(record.dropped.values())}  "
        f"idle trainer {record.trainer_idle_share:.0%} engines {record.generator_idle_share:.0%}"
    )


def step_table(record: StepRecord) -> Group:
    """A step as a table with the bottleneck below it."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(record.dropped.items())) or "0"
    step = f"{record.rollout_id + 1} of {record.num_rollout} (rollout {record.rollout_id})"
    rows = [
        ("step", step, "policy version", str(record.policy_version)),
        (
            "reward",
            f"{record.reward_mean:.3f} ± {record.reward_std:.3f}",
            "groups with signal",
            f"{record.signal_share:.0%}",
        ),
        (
            "staleness",
            f"{record.staleness_mean:.2f} mean, {record.staleness_max} max",
            "truncated",
            f"{record.truncated_share:.0%}",
        ),
        (
            "tokens/s",
            f"{record.generated_tokens_per_s:.0f} generated",
            "",
            f"{record.trained_tokens_per_s:.0f} trained",
        ),
        ("queue", f"{record.pending} pending, {record.in_flight} in flight", "dropped", dropped),
        ("idle", f"trainer {record.trainer_idle_share:.0%}", "", f"engines {record.generator_idle_share:.0%}"),
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table, Text(bottleneck_of(record)))


def bottleneck_of(record: StepRecord) -> str:
    """The slower side at a step."""
    return bottleneck(record.trainer_idle_share, record.generator_idle_share, record.reward_time_share, record.reward)
