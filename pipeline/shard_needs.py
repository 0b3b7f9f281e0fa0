"""What a rank reads of each sample beside tokens, masks and the sampler's log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.candidates import NO_CANDIDATES, CandidateNeeds, candidate_needs
from vime.backends.megatron_utils.route_part import RoutePart
from vime.settings.groups import Settings


@dataclass(frozen=True)
class ShardNeeds:
    """Nothing by default."""

    candidates: CandidateNeeds = NO_CANDIDATES
    routes: RoutePart | None = None
    """Which of the sampler's routes."""
    routes_ahead: int = 1
    """Microbatches whose routes wait in memory beside those that the caller holds."""
    teacher: bool = False
    """The teacher's log-probabilities."""


NO_NEEDS = ShardNeeds()


def shard_needs(settings: Settings, part: RoutePart | None) -> ShardNeeds:
    """Needs of a rank that replays `part` of the sampler's routes; a teacher of Megatron's has nothing stored."""
    objective = settings.objective
    return ShardNeeds(
        candidates=candidate_needs(settings),
        routes=part,
        routes_ahead=objective.routing_replay_prefetch_microbatches,
        teacher=objective.use_opd and objective.opd_type == "vllm",
    )
