"""Rules that hold settings against the model's config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vime.counted import counted
from vime.errors import VimeError
from vime.models.families import BIASED_ROUTER, FAMILIES, family_named, family_of
from vime.models.shape import contradictions
from vime.models.weight_names import num_further_layers
from vime.settings.groups import Settings
from vime.settings.rules.json_files import model_config, read_json
from vime.settings.rules.problem import Problem, problem, problem_of
from vime.settings.rules.quantities import has_critic, longest_sequence, option, size

_LAYOUT = "--pipeline-model-parallel-layout"


def checkpoint_is_a_known_model(settings: Settings) -> Iterator[Problem]:
    """Tokenizer, config and first weights come from one local folder; models are not downloaded.

    A job without a trainer serves what the engine knows.
    """
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
            next_step="Name such a folder; `hf download NAME --local-dir FOLDER` makes one.",
        )
        return
    config = read_json("--hf-checkpoint", str(config_path))
    if isinstance(config, Problem):
        yield config
    elif (name := settings.checkpoint.model_name) is not None:
        if family_named(name) is None:
            yield problem(
                settings,
                "--model-name",
                allowed=", ".join(FAMILIES),
                reason="vime knows no other model's shape and weights.",
                next_step="Name the family that the checkpoint's weights are of.",
            )
    elif family_of(config) is None and not settings.debug.debug_rollout_only:
        yield problem(
            settings,
            "--hf-checkpoint",
            found=f"{config_path}: model_type is {config.get('model_type')!r}",
            allowed=", ".join(FAMILIES),
            reason="vime knows no other model's shape.",
            next_step="Choose a model of an allowed type.",
        )


def the_router_names_its_method(settings: Settings) -> Iterator[Problem]:
    """vLLM has no place for the router's selection bias where config.json doesn't name the method."""
    config = model_config(settings)
    method = config.get("topk_method")
    if family_of(config) == "deepseek_v3" and method != BIASED_ROUTER and not settings.objective.is_supervised:
        yield problem(
            settings,
            "--hf-checkpoint",
            found=f"{settings.checkpoint.hf_checkpoint}/config.json: topk_method is {method or 'left out'}",
            allowed=BIASED_ROUTER,
            reason="Without it the engine has no place for the router's selection bias.",
            next_step=f'Add "topk_method": "{BIASED_ROUTER}" to config.json where the model has that bias.',
        )


def tensor_size_divides_the_heads(settings: Settings) -> Iterator[Problem]:
    """Attention heads are dealt to tensor-parallel ranks."""
    config, tensor = model_config(settings), size(settings.megatron_args, "--tensor-model-parallel-size")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = config.get(key)
        if isinstance(heads, int) and heads % tensor and (key == "num_attention_heads" or tensor % heads):
            yield _megatron_problem("--tensor-model-parallel-size", tensor, key, heads, "Heads are dealt to ranks.")


def pipeline_size_divides_the_layers(settings: Settings) -> Iterator[Problem]:
    """Stages are equal unless a layout says otherwise."""
    words, layers = settings.megatron_args, model_config(settings).get("num_hidden_layers")
    pipeline = size(words, "--pipeline-model-parallel-size")
    uneven = (
        _LAYOUT,
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
    config = model_config(settings)
    if family_of(config) is None:
        return
    try:
        found = contradictions(config, settings.megatron_args)
    except VimeError as error:
        yield problem_of("--hf-checkpoint", error)
        return
    for contradiction in found:
        yield Problem(
            (contradiction.flag, "--hf-checkpoint"),
            str(contradiction),
            contradiction.allowed,
            "Trainer and engine must build the same model.",
            f"Leave out {contradiction.flag}; vime reads the model's shape from config.json.",
        )


def routes_come_from_experts(settings: Settings) -> Iterator[Problem]:
    """A dense model has no routes to replay."""
    objective, config = settings.objective, model_config(settings)
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
    objective, vocabulary = settings.objective, model_config(settings).get("vocab_size")
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
    padded, vocabulary = settings.trainer.padded_vocab_size, model_config(settings).get("vocab_size")
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
    context, longest = model_config(settings).get("max_position_embeddings"), longest_sequence(settings)
    given = option(settings.vllm_args, "--vllm-max-model-len")
    if given is None and isinstance(context, int) and longest > context:
        yield problem(
            settings,
            "--rollout-max-prompt-len --rollout-max-response-len --rollout-max-context-len",
            found=f"Prompt and response may have {longest} tokens, the model's context (max_position_embeddings) is "
            f"{context}",
            allowed=f"{context} or fewer tokens together",
            reason="The engine refuses longer requests.",
            next_step=f"Lower --rollout-max-response-len, or give --rollout-max-context-len {context}. An engine that "
            "scales positions takes more with --vllm-max-model-len.",
        )


def layers_for_further_tokens_are_in_the_checkpoint(settings: Settings) -> Iterator[Problem]:
    """They are trained on from where their publisher left them, each depth with a layer of its own."""
    asked, config = settings.trainer.mtp_num_layers, model_config(settings)
    if asked is None or not config:
        return
    there = num_further_layers(config)
    if asked > there:
        yield problem(
            settings,
            "--mtp-num-layers",
            allowed=f"1 to {there}" if there else "left out",
            reason=f"The checkpoint (model_type {config.get('model_type')}, num_nextn_predict_layers "
            f"{config.get('num_nextn_predict_layers') or 0}) has {counted(there, 'such layer')} that vime knows.",
            next_step="Give as many as the checkpoint has, or leave it out.",
        )
    if settings.trainer.custom_model_provider_path is not None:
        yield problem(
            settings,
            "--mtp-num-layers --custom-model-provider-path",
            allowed="one of them",
            reason="vime builds these layers into its own model.",
            next_step="Leave out one of the two.",
        )
    if option(settings.megatron_args, "--mtp-use-repeated-layer") is not None:
        yield Problem(
            ("--mtp-use-repeated-layer",),
            "--mtp-use-repeated-layer is given",
            "left out",
            "Each depth has a layer of its own in a checkpoint.",
            "Leave it out.",
        )


def a_layout_places_layers_for_further_tokens(settings: Settings) -> Iterator[Problem]:
    """They are computed where the head is: on the last stage."""
    layout = option(settings.megatron_args, _LAYOUT)
    if not layout:
        return
    asked, stages = settings.trainer.mtp_num_layers or 0, layout_stages(layout)
    if asked and has_critic(settings):
        yield problem(
            settings,
            "--mtp-num-layers --advantage-estimator",
            found=f"{_LAYOUT} is given with both --mtp-num-layers and --advantage-estimator ppo",
            allowed="two of the three",
            reason="The critic has the same layout and none of these layers.",
            next_step=f"Leave out {_LAYOUT}: Megatron then places these layers beside the head.",
        )
        return
    last, everywhere = stages[-1].count("m"), "".join(stages).count("m")
    if (last, everywhere) != (asked, asked):
        yield Problem(
            (_LAYOUT, "--mtp-num-layers"),
            f"{_LAYOUT} {layout} has {last} m on its last stage and {everywhere - last} on others, --mtp-num-layers is "
            f"{settings.trainer.mtp_num_layers or 'left out'}",
            f"{asked} m on the last stage" if asked else "no m",
            "Each m is a layer of --mtp-num-layers, and these lie beside the head.",
            "Write one m before L for each of these layers." if asked else "Leave out m, or give --mtp-num-layers.",
        )


def layout_stages(layout: str) -> list[str]:
    """The stages of Megatron's layout string (`Et*2|(t|)*3tL`), each with one letter a layer."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda found: found[1] * int(found[2]), layout)
    return layout.replace(",", "").split("|")


def _megatron_problem(flag: str, value: int, key: str, wanted: int, reason: str) -> Problem:
    return Problem(
        (flag, "--hf-checkpoint"),
        f"{flag} is {value}, the model's config.json has {key} {wanted}",
        f"a divisor of {wanted}",
        reason,
        f"Change {flag}.",
    )


RULES = (
    checkpoint_is_a_known_model,
    the_router_names_its_method,
    tensor_size_divides_the_heads,
    pipeline_size_divides_the_layers,
    shape_flags_agree_with_the_config,
    routes_come_from_experts,
    candidates_fit_the_vocabulary,
    padding_holds_the_vocabulary,
    model_context_holds_a_sequence,
    layers_for_further_tokens_are_in_the_checkpoint,
    a_layout_places_layers_for_further_tokens,
)
