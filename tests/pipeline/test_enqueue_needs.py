"""What the flags of an objective ask of a sample."""

from __future__ import annotations

import pytest

from pipeline.enqueue_needs import enqueue_needs, route_shape
from storage.checks import EnqueueRequirements
from storage.route_checks import RouteShape
from tests.support.seed_model import QWEN3_4B
from vime.errors import ModelError
from vime.settings.parse import parse_settings

MOE = {
    **QWEN3_4B,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def needs(*flags: str) -> EnqueueRequirements:
    return enqueue_needs(parse_settings(list(flags)), MOE)


def test_a_plain_run_needs_log_probabilities_versions_and_known_tokens() -> None:
    assert needs() == EnqueueRequirements(sampled=True, vocab_size=QWEN3_4B["vocab_size"])


def test_routing_replay_needs_routes_of_the_models_shape() -> None:
    assert needs("--use-rollout-routing-replay").routes == RouteShape(36, 8, 128)


def test_score_centering_needs_its_candidates_or_those_of_top_p() -> None:
    centered = needs("--use-score-centering", "--score-centering-top-k", "64")
    assert (centered.sc_top_k, centered.top_p) == (64, False)
    truncated = needs("--use-score-centering", "--rollout-top-p", "0.9")
    assert (truncated.sc_top_k, truncated.top_p) == (None, True)


def test_a_sample_must_fit_a_microbatch_over_all_context_parallel_ranks() -> None:
    assert needs("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100").max_tokens == 100
    flags = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100", "--context-parallel-size", "2")
    assert needs(*flags).max_tokens == 200
    assert needs("--max-tokens-per-gpu", "100").max_tokens is None


def test_supervised_fine_tuning_needs_nothing_of_a_sampler() -> None:
    assert not needs("--loss-type", "sft_loss").sampled


def test_a_teacher_in_an_engine_scores_before_the_queue_and_one_in_the_trainer_after_it() -> None:
    assert needs("--use-opd", "--opd-type", "vllm").teacher
    assert not needs("--use-opd", "--opd-type", "megatron").teacher


def test_layers_without_experts_have_no_routes() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 2, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 16, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "rope_theta": 10000,
    }  # fmt: skip
    assert route_shape(config) == RouteShape(num_layers=3, top_k=4, num_experts=16)


def test_routing_replay_of_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="type 'qwen3' has no experts"):
        route_shape(QWEN3_4B)
