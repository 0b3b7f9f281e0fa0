"""Rules on critic and teacher: models beside the actor."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import has_critic, own_engines


def critic_steps_have_a_critic(settings: Settings) -> Iterator[Problem]:
    """Only ppo has a critic."""
    if settings.objective.num_critic_only_steps and not has_critic(settings):
        yield problem(
            settings,
            "--num-critic-only-steps --advantage-estimator",
            allowed="ppo",
            reason="Only ppo has a critic.",
            next_step="Leave out --num-critic-only-steps, or give --advantage-estimator ppo.",
        )


def distillation_says_where_its_teacher_runs(settings: Settings) -> Iterator[Problem]:
    """An engine or a second Megatron model: there is no default."""
    if settings.objective.use_opd and settings.objective.opd_type is None:
        yield problem(
            settings,
            "--use-opd --opd-type",
            allowed="--opd-type vllm or megatron",
            reason="The teacher runs in an engine or in the trainer.",
            next_step="Give --opd-type.",
        )


def teacher_settings_have_a_teacher(settings: Settings) -> Iterator[Problem]:
    """Without --use-opd these would be ignored."""
    objective = settings.objective
    if objective.use_opd:
        return
    given = {
        "--opd-type": objective.opd_type,
        "--opd-teacher-load": objective.opd_teacher_load,
        "--opd-teacher-ckpt-step": objective.opd_teacher_ckpt_step,
        "--opd-teacher-model": objective.opd_teacher_model,
    }
    for flag, value in given.items():
        if value is not None:
            yield problem(
                settings,
                f"{flag} --use-opd",
                allowed="both",
                reason="There is no teacher without --use-opd.",
                next_step=f"Give --use-opd, or leave out {flag}.",
            )


def megatron_teacher_has_a_checkpoint(settings: Settings) -> Iterator[Problem]:
    """The trainer loads it."""
    objective = settings.objective
    if objective.use_opd and objective.opd_type == "megatron" and objective.opd_teacher_load is None:
        yield problem(
            settings,
            "--opd-type --opd-teacher-load",
            allowed="both",
            reason="The trainer loads the teacher from there.",
            next_step="Give --opd-teacher-load DIR.",
        )


def vllm_teacher_has_no_checkpoint(settings: Settings) -> Iterator[Problem]:
    """A teacher in an engine is named by its server, so a Megatron checkpoint would never be read."""
    objective = settings.objective
    if objective.use_opd and objective.opd_type == "vllm" and objective.opd_teacher_load is not None:
        yield problem(
            settings,
            "--opd-type --opd-teacher-load",
            allowed="--opd-type megatron, or no --opd-teacher-load",
            reason="An engine doesn't read Megatron checkpoints.",
            next_step="Leave out --opd-teacher-load.",
        )


def vllm_teacher_has_an_address(settings: Settings) -> Iterator[Problem]:
    """A model of --vllm-config, or a server of someone else's."""
    objective = settings.objective
    has_address = settings.rollout.rm_url is not None or objective.opd_teacher_model is not None
    if objective.use_opd and objective.opd_type == "vllm" and not has_address:
        yield problem(
            settings,
            "--opd-type --opd-teacher-model --rm-url",
            found="--opd-type vllm without --opd-teacher-model and --rm-url",
            allowed="one of them",
            reason="The teacher is a model of --vllm-config or a server of someone else's.",
            next_step="Give --opd-teacher-model NAME or --rm-url ADDRESS.",
        )


def vllm_teacher_scores_at_the_temperature(settings: Settings) -> Iterator[Problem]:
    """vLLM scores the tokens of a prompt without temperature, whatever the request says."""
    objective, temperature = settings.objective, settings.rollout.rollout_temperature
    asks = objective.use_opd and objective.opd_type == "vllm" and objective.opd_teacher_scoring == "prompt-logprobs"
    if asks and temperature != 1:
        yield problem(
            settings,
            "--opd-teacher-scoring --rollout-temperature",
            allowed="--rollout-temperature 1",
            reason="vLLM scores the tokens of a prompt at temperature 1, so student and teacher would be compared at "
            "two temperatures.",
            next_step="Give --rollout-temperature 1, --opd-teacher-scoring per-position, or --opd-type megatron.",
        )


def teacher_model_is_configured(settings: Settings) -> Iterator[Problem]:
    """Names of models are those of --vllm-config."""
    if settings.objective.opd_teacher_model is not None and settings.engine.vllm_config is None:
        yield problem(
            settings,
            "--opd-teacher-model --vllm-config",
            allowed="both",
            reason="It is the name of a model of --vllm-config.",
            next_step="Give --vllm-config FILE.",
        )


def teacher_model_is_served(settings: Settings) -> Iterator[Problem]:
    """A frozen model of the file; the trained one would be its own teacher."""
    name, path = settings.objective.opd_teacher_model, settings.engine.vllm_config
    frozen = {spec.model for spec in own_engines(settings) if not spec.is_trained and spec.kind != "placeholder"}
    if name is not None and path is not None and own_engines(settings) and name not in frozen:
        yield problem(
            settings,
            "--opd-teacher-model --vllm-config",
            found=f"--opd-teacher-model is {name}, {path} has no such model that keeps its weights",
            allowed=", ".join(sorted(frozen)) or "a model with update_weights: false",
            reason="The teacher is a served model that isn't trained.",
            next_step="Correct the name, or add the model to the file.",
        )


RULES = (
    critic_steps_have_a_critic,
    distillation_says_where_its_teacher_runs,
    teacher_settings_have_a_teacher,
    megatron_teacher_has_a_checkpoint,
    vllm_teacher_has_no_checkpoint,
    vllm_teacher_has_an_address,
    vllm_teacher_scores_at_the_temperature,
    teacher_model_is_configured,
    teacher_model_is_served,
)
