"""How samples are generated, from the settings."""

from __future__ import annotations

from pipeline.sample_columns import sample_columns
from vime.rollout.generate import GenerateSettings
from vime.rollout.sampling import SamplingSettings
from vime.settings.groups import Settings


def generate_settings(settings: Settings) -> GenerateSettings:
    """What requests for samples have in common."""
    return GenerateSettings(
        apply_chat_template=settings.data.apply_chat_template,
        template_kwargs=settings.data.apply_chat_template_kwargs,
        columns=sample_columns(settings),
    )


def rollout_sampling(settings: Settings) -> SamplingSettings:
    """How samples are drawn that are trained."""
    rollout = settings.rollout
    return SamplingSettings(
        max_response_tokens=rollout.rollout_max_response_len or 1,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_context_tokens=rollout.rollout_max_context_len,
        stop=rollout.rollout_stop or (),
        stop_token_ids=rollout.rollout_stop_token_ids or (),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
        seed=request_seed_of(settings),
    )


def request_seed_of(settings: Settings) -> int | None:
    """What the seeds of requests are made of; None where requests are not seeded."""
    return settings.data.rollout_seed if settings.engine.vllm_enable_deterministic_inference else None
