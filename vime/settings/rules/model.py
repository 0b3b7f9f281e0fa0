"""Rules that hold settings against the model's config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.settings.groups import Settings
from vime.settings.rules.config_files import read_json
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import longest_sequence, option, size

SUPPORTED_MODEL_TYPES = ("qwen3",)

_SHAPE_FLAGS = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab_size",
    "--norm-epsilon": "rms_norm_eps",
    "--rotary-base": "rope_theta",
}
"""Megatron's flags for what config.json says already."""


def checkpoint_is_a_supported_model(settings: Settings) -> Iterator[Problem]:
    """Tokenizer, config and first weights come from one local folder; models are not downloaded."""
    folder = settings.checkpoint.hf_checkpoint
    if folder is None:
        return
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        yield problem(
            settings,
            "--hf-checkpoint",
            found=f"--hf-checkpoint {folder}: no config.json there",
            allowed="a Hugging Face folder on this machine",
            reason="Models are not downloaded.",
            next_step="Name such a folder.",
        )
        return
    config = read_json("--hf-checkpoint", str(config_path))
    if isinstance(config, Problem):
        yield config
    elif config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        yield problem(
            settings,
            "--hf-checkpoint",
            found=f"{config_path}: model_type is {config.get('model_type')!r}",
            allowed=", ".join(SUPPORTED_MODEL_TYPES),
            reason="The trainer builds no other model.",
            next_step="Choose a model of an allowed type.",
        )


def tensor_size_divides_the_heads(settings: Settings) -> Iterator[Problem]:
    """Attention heads are dealt to tensor-parallel ranks."""
    config, tensor = _config(settings), size(settings.megatron_args, "--tensor-model-parallel-size")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = config.get(key)
        if isinstance(heads, int) and heads % tensor and (key == "num_attention_heads" or tensor % heads):
            yield _megatron_problem("--tensor-model-parallel-size", tensor, key, heads, "Heads are dealt to ranks.")


def pipeline_size_divides_the_layers(settings: Settings) -> Iterator[Problem]:
    """Stages are equal unless a layout says otherwise."""
    words, layers = settings.megatron_args, _config(settings).get("num_hidden_layers")
    pipeline = size(words, "--pipeline-model-parallel-size")
    uneven = (
        "--pipeline-model-parallel-layout",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    )
    if isinstance(layers, int) and layers % pipeline and all(option(words, flag) is None for flag in uneven):
        yield _megatron_problem(
            "--pipeline-model-parallel-size", pipeline, "num_hidden_layers", layers, "Stages have equal layers."
        )


def shape_flags_agree_with_the_config(settings: Settings) -> Iterator[Problem]:
    """Trainer and engine must build the same model; the flags would change the trainer's alone."""
    config = _config(settings)
    for flag, key in _SHAPE_FLAGS.items():
        given, wanted = option(settings.megatron_args, flag), config.get(key)
        if given is not None and isinstance(wanted, int | float) and not _equals(given, wanted):
            yield Problem(
                (flag, "--hf-checkpoint"),
                f"{flag} is {given}, the model's config.json has {key} {wanted}",
                f"{wanted}, or left out",
                "Trainer and engine must build the same model.",
                f"Leave out {flag}; vime reads the model's shape from config.json.",
            )


def routes_come_from_experts(settings: Settings) -> Iterator[Problem]:
    """A dense model has no routes to replay."""
    objective, config = settings.objective, _config(settings)
    replays = objective.use_routing_replay or objective.use_rollout_routing_replay
    if replays and config and not any("expert" in key for key in config):
        flag = "--use-rollout-routing-replay" if objective.use_rollout_routing_replay else "--use-routing-replay"
        yield problem(
            settings,
            f"{flag} --hf-checkpoint",
            allowed="a mixture-of-experts model",
            reason="A dense model has no routes.",
            next_step=f"Leave out {flag}.",
        )


def candidates_fit_the_vocabulary(settings: Settings) -> Iterator[Problem]:
    """The engine can't return more candidates than there are tokens."""
    objective, vocabulary = settings.objective, _config(settings).get("vocab_size")
    used = objective.use_score_centering and settings.rollout.rollout_top_p == 1
    if used and isinstance(vocabulary, int) and objective.score_centering_top_k > vocabulary:
        yield problem(
            settings,
            "--score-centering-top-k",
            allowed=f"{vocabulary} or less",
            reason="The model has no more tokens.",
            next_step="Lower --score-centering-top-k.",
        )


def padding_holds_the_vocabulary(settings: Settings) -> Iterator[Problem]:
    """Rows are added to the embedding, never cut off."""
    padded, vocabulary = settings.trainer.padded_vocab_size, _config(settings).get("vocab_size")
    if padded is not None and isinstance(vocabulary, int) and padded < vocabulary:
        yield problem(
            settings,
            "--padded-vocab-size",
            allowed=f"{vocabulary} or more",
            reason="The model's vocabulary has as many tokens.",
            next_step="Leave out --padded-vocab-size.",
        )


def model_context_holds_a_sequence(settings: Settings) -> Iterator[Problem]:
    """Without --vllm-max-model-len the engine takes its context from config.json and refuses longer requests."""
    context, longest = _config(settings).get("max_position_embeddings"), longest_sequence(settings)
    given = option(settings.vllm_args, "--vllm-max-model-len")
    if given is None and isinstance(context, int) and longest > context:
        yield problem(
            settings,
            "--rollout-max-prompt-len --rollout-max-response-len --rollout-max-context-len",
            found=f"Prompt and response may have {longest} tokens, the model's context (max_position_embeddings) is "
            f"{context}",
            allowed=f"{context} or fewer tokens together",
            reason="The engine refuses longer requests.",
            next_step="Lower --rollout-max-response-len, or give --vllm-max-model-len.",
        )


def _config(settings: Settings) -> Mapping[str, Any]:
    """The model's config.json; empty when it can't be read (another rule says so)."""
    folder = settings.checkpoint.hf_checkpoint
    config = {} if folder is None else read_json("--hf-checkpoint", str(Path(folder) / "config.json"))
    return {} if isinstance(config, Problem) else config


def _equals(given: str, wanted: float) -> bool:
    try:
        return float(given) == float(wanted)
    except ValueError:
        return False


def _megatron_problem(flag: str, value: int, key: str, wanted: int, reason: str) -> Problem:
    return Problem(
        (flag, "--hf-checkpoint"),
        f"{flag} is {value}, the model's config.json has {key} {wanted}",
        f"a divisor of {wanted}",
        reason,
        f"Change {flag}.",
    )


RULES = (
    checkpoint_is_a_supported_model,
    tensor_size_divides_the_heads,
    pipeline_size_divides_the_layers,
    shape_flags_agree_with_the_config,
    routes_come_from_experts,
    candidates_fit_the_vocabulary,
    padding_holds_the_vocabulary,
    model_context_holds_a_sequence,
)
