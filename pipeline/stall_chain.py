"""Who waits for whom, in one sentence, from what the processes of a run say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from pipeline.activity import GroupActivity, Phase, ProducerActivity
from pipeline.messages import QueueCounts
from pipeline.stages import Stage
from vime.counted import agreeing, counted

LINK = " <- "


class RankActivity(msgspec.Struct, frozen=True):
    """What a trainer rank says of itself."""

    doing: str
    """The call that the model's thread works on; empty when there is none."""
    age_s: float
    num_steps: int
    """Optimizer steps since it was built."""
    beside: str = ""
    """The call of a publication that goes on beside the model's thread; empty when there is none."""
    beside_s: float = 0.0


@dataclass(frozen=True)
class Silent:
    """A process that doesn't say what it is at, and why: "does not answer within 5 s"."""

    why: str


@dataclass(frozen=True)
class RunReport:
    """What all processes say at one moment."""

    stage: Stage
    counts: QueueCounts | Silent
    producers: Sequence[ProducerActivity | Silent] = ()
    ranks: Sequence[RankActivity | Silent] = ()
    engines: dict[str, Silent] = field(default_factory=dict)
    """Addresses of engines that don't sample, or get no requests -> why."""
    frozen: dict[str, Silent] = field(default_factory=dict)
    """The same of engines that aren't trained: responses are scored and judged by them."""

    @property
    def num_ended(self) -> int | None:
        """Groups that have come to an end: accepted, or set aside. None while nobody tells."""
        counts = self.counts
        if isinstance(counts, Silent):
            return None
        return counts.pending + counts.trained + sum(counts.dropped.values())

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the rank that has taken the most. None while no rank tells."""
        return max((rank.num_steps for rank in self.ranks if isinstance(rank, RankActivity)), default=None)


def chain_words(report: RunReport) -> str:
    """As "step 41 waits for 3 groups <- 2 in reward, oldest 94 s: judge; 1 generating, 12,288 tokens"."""
    return LINK.join([_stage_words(report), *_blockers(report)])


def _stage_words(report: RunReport) -> str:
    stage = report.stage
    if stage.groups_wanted is None:
        return str(stage)
    there = 0 if isinstance(report.counts, Silent) else report.counts.pending
    return f"{stage} waits for {counted(max(0, stage.groups_wanted - there), 'group')}"


def _blockers(report: RunReport) -> Iterator[str]:
    if isinstance(report.counts, Silent):
        yield f"the queue coordinator {report.counts.why}"
    if report.stage.groups_wanted is not None:
        yield from _generation(report)
    else:
        yield from _training(report)
    engines = _engines_that_matter(report)
    if engines:
        yield "; ".join(f"engine {address} {silent.why}" for address, silent in sorted(engines.items()))


def _engines_that_matter(report: RunReport) -> dict[str, Silent]:
    if report.stage.groups_wanted is None:
        return report.engines
    return report.frozen | (report.engines if _held_back(report) or _is_generating(report) else {})


def _generation(report: RunReport) -> Iterator[str]:
    silent = [f"producer {n} {p.why}" for n, p in enumerate(report.producers) if isinstance(p, Silent)]
    groups = [group for producer in _telling(report) for group in producer.groups]
    links = [*silent, *_group_words(groups, _reward(report))]
    if links:
        yield "; ".join(links)
    if _held_back(report):
        yield "requests are held back until engines have confirmed a version"
        yield from _publishing(report)
    if isinstance(report.counts, Silent):
        return
    yield from report.counts.notices
    if not links and not _held_back(report):
        yield _idle_words(report.counts)


def _group_words(groups: Sequence[GroupActivity], reward: str) -> Iterator[str]:
    for phase in (Phase.REWARD, Phase.GENERATING, Phase.WRITING):
        members = [group for group in groups if group.phase is phase]
        if not members:
            continue
        oldest = f"oldest {max(group.age_s for group in members):.0f} s"
        if phase is Phase.REWARD:
            yield f"{len(members)} {phase.value}, {oldest}: {reward}"
        elif phase is Phase.GENERATING:
            tokens = sum(group.num_tokens for group in members)
            yield f"{len(members)} {phase.value}, {oldest}, {tokens:,} tokens"
        else:
            yield f"{len(members)} {phase.value}, {oldest}"


def _idle_words(counts: QueueCounts) -> str:
    """Why no producer works on a group."""
    if counts.in_flight:
        are = agreeing(counts.in_flight, "is")
        return f"{counted(counts.in_flight, 'group')} {are} leased, and no producer works on any"
    if counts.backpressured:
        return "the producers have nothing to do: the queue hands out no more groups"
    return f"the producers have nothing to do, and {counted(counts.fresh, 'prompt')} {agreeing(counts.fresh, 'waits')}"


def _training(report: RunReport) -> Iterator[str]:
    words = [_rank_words(number, rank) for number, rank in enumerate(report.ranks)]
    if words:
        yield "; ".join(words)


def _publishing(report: RunReport) -> Iterator[str]:
    """What ranks do of a publication beside the training."""
    words = [
        f"trainer rank {number}: {_beside_words(rank)}"
        for number, rank in enumerate(report.ranks)
        if isinstance(rank, RankActivity) and rank.beside
    ]
    if words:
        yield "; ".join(words)


def _rank_words(number: int, rank: RankActivity | Silent) -> str:
    if isinstance(rank, Silent):
        return f"trainer rank {number} {rank.why}"
    doing = [f"{rank.doing}, {rank.age_s:.0f} s"] if rank.doing else []
    doing += [_beside_words(rank)] if rank.beside else []
    return f"trainer rank {number}: {' and '.join(doing)}" if doing else f"trainer rank {number} waits"


def _beside_words(rank: RankActivity) -> str:
    return f"{rank.beside}, {rank.beside_s:.0f} s"


def _telling(report: RunReport) -> list[ProducerActivity]:
    return [producer for producer in report.producers if isinstance(producer, ProducerActivity)]


def _held_back(report: RunReport) -> bool:
    telling = _telling(report)
    return bool(telling) and not any(producer.is_admitted for producer in telling)


def _is_generating(report: RunReport) -> bool:
    return any(group.phase is Phase.GENERATING for producer in _telling(report) for group in producer.groups)


def _reward(report: RunReport) -> str:
    return next((producer.reward for producer in _telling(report)), "the reward")
