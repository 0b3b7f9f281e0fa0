"""Which process is killed when: a pure function of a seed and the kill's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from vime.utils.kill_points import KillPoint


class Victim(Enum):
    """A role; of several processes of it one is drawn."""

    PRODUCER = "producer"
    TRAINER = "trainer"
    COORDINATOR = "coordinator"
    ENGINE = "engine"
    ROUTER = "router"
    DRIVER = "driver"
    TREE = "tree"
    """Every process of the job at once."""


POINT_SHARE = 0.5
"""Kills at a named point; the others come at a random moment."""
START_SHARE = 0.15
"""Of the kills at a random moment, those that may come before the first step."""
NEW_SESSION_SHARE = 0.1
"""Kills before which a session that has survived the last one is told to stop, and another one resumes."""
ANEW_SHARE = 0.05
"""Kills whose session, if they need one, starts interpreters and a Ray of its own; others fork and join a cluster."""
MAX_START_S = 12.0
FORKED_START = 0.35
"""Time that a forked session's start takes, over that of one that starts anew."""
MAX_AFTER_S = 3.0


@dataclass(frozen=True)
class Layout:
    """How many processes a session has."""

    num_trainers: int
    num_engines: int
    num_producers: int = 1

    def __str__(self) -> str:
        return f"{self.num_trainers} ranks, {self.num_engines} engines, {self.num_producers} producers"


@dataclass(frozen=True)
class Kill:
    """One kill: at `point`, or of `victim` some seconds after the start or after a step."""

    number: int
    layout: Layout
    """Of the session that is started for it, unless one still runs."""
    point: KillPoint | None = None
    victim: Victim | None = None
    delay_s: float = 0.0
    from_start: bool = False
    """Before the first step of a session of its own."""
    new_session: bool = False
    draw: float = 0.0
    """Of several processes of the victim's role, which: in [0, 1)."""
    steps_before: int = 0
    """Steps that a kill at a point lets pass."""
    anew: bool = False
    """Whether the session that is started for it is no fork and has a Ray of its own."""

    def __str__(self) -> str:
        if self.point is not None:
            return f"kill {self.number}: at {self.point.value} after {self.steps_before} steps"
        since = "the start" if self.from_start else "a step"
        name = "" if self.victim is None else self.victim.value
        return f"kill {self.number}: {name} {self.delay_s:.1f} s after {since}"


def plan_kill(seed: int, number: int, layouts: list[Layout]) -> Kill:
    """The kill of that number; the points take turns, so that each comes in any campaign that is long enough."""
    draw = random.Random(f"{seed}/{number}")
    layout = draw.choice(layouts)
    new_session = draw.random() < NEW_SESSION_SHARE
    if draw.random() < POINT_SHARE:
        points = list(KillPoint)
        order = random.Random(f"{seed}/{number // len(points)}").sample(points, len(points))
        point = order[number % len(points)]
        steps_before = draw.randrange(3)
        anew = draw.random() < ANEW_SHARE
        return Kill(number, layout, point=point, new_session=new_session, steps_before=steps_before, anew=anew)
    from_start = draw.random() < START_SHARE
    delay_s = draw.uniform(0.0, MAX_START_S if from_start else MAX_AFTER_S)
    # Not everything has started so early, so what is killed is what always runs.
    victim = draw.choice([Victim.DRIVER, Victim.TREE] if from_start else list(Victim))
    place, anew = draw.random(), draw.random() < ANEW_SHARE
    if from_start and not anew:
        delay_s *= FORKED_START
    return Kill(
        number,
        layout,
        victim=victim,
        delay_s=delay_s,
        from_start=from_start,
        new_session=new_session or from_start,
        draw=place,
        anew=anew,
    )
