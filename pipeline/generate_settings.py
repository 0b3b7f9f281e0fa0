"""How samples are generated, from the settings."""

from __future__ import annotations

from pipeline.sample_columns import sample_columns
from vime.rollout.generate import GenerateSettings
from vime.settings.groups import Settings


def generate_settings(settings: Settings) -> GenerateSettings:
    """For samples that are trained."""
    rollout, data = settings.rollout, settings.data
    return GenerateSettings(
        max_response_tokens=rollout.rollout_max_response_len or 1,
        temperature=rollout.rollout_temperature,
        apply_chat_template=data.apply_chat_template,
        template_kwargs=data.apply_chat_template_kwargs,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_context_tokens=rollout.rollout_max_context_len,
        stop=rollout.rollout_stop or (),
        stop_token_ids=rollout.rollout_stop_token_ids or (),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
        seed=request_seed_of(settings),
        columns=sample_columns(settings),
    )


def request_seed_of(settings: Settings) -> int | None:
    """What the seeds of requests are made of; None where requests are not seeded."""
    return settings.data.rollout_seed if settings.engine.vllm_enable_deterministic_inference else None
