"""What the settings' objective needs an engine to return with each token."""

from __future__ import annotations

from vime.backends.vllm_utils.protocol import SampleColumns
from vime.settings.groups import Settings


def sample_columns(settings: Settings) -> SampleColumns:
    """For samples that are trained; evaluation asks for no columns.

    It is what `enqueue_needs` checks of a sample and `candidate_needs` reads of a stored one.
    """
    objective, has_nucleus = settings.objective, settings.rollout.rollout_top_p < 1
    return SampleColumns(
        num_candidates=objective.score_centering_top_k if objective.use_score_centering and not has_nucleus else 0,
        routes=objective.use_rollout_routing_replay,
        nucleus=has_nucleus,
    )
