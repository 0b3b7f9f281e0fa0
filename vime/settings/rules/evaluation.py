"""Rules on evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import FULLY_ASYNC
from vime.settings.schemas.eval_sets import named_eval_files


def evaluates(settings: Settings) -> bool:
    """Whether a data set is named."""
    return settings.evaluation.eval_prompt_data is not None or settings.evaluation.eval_config is not None


def evaluation_has_data(settings: Settings) -> Iterator[Problem]:
    """An interval without data would evaluate nothing."""
    evaluation = settings.evaluation
    if evaluation.eval_interval is not None and not evaluates(settings):
        yield problem(
            settings,
            "--eval-interval --eval-prompt-data",
            found=f"--eval-interval {evaluation.eval_interval} without --eval-prompt-data and --eval-config",
            allowed="one of them",
            reason="There is nothing to evaluate on.",
            next_step="Give --eval-prompt-data NAME PATH or --eval-config FILE.",
        )


def a_run_without_training_evaluates(settings: Settings) -> Iterator[Problem]:
    """Without either it would do nothing."""
    if settings.data.num_rollout == 0 and not evaluates(settings):
        yield problem(
            settings,
            "--num-rollout --eval-prompt-data",
            allowed="1 or more, or an evaluation data set",
            reason="Without training there is only evaluation.",
            next_step="Give --eval-prompt-data NAME PATH or --eval-config FILE.",
        )


def evaluation_data_is_used(settings: Settings) -> Iterator[Problem]:
    """Without an interval a training run never evaluates."""
    evaluation = settings.evaluation
    flag = "--eval-prompt-data" if evaluation.eval_prompt_data is not None else "--eval-config"
    if evaluates(settings) and evaluation.eval_interval is None and settings.data.num_rollout != 0:
        yield problem(
            settings,
            f"{flag} --eval-interval",
            allowed="both",
            reason="Without an interval a run that trains never evaluates.",
            next_step="Give --eval-interval N.",
        )


def evaluation_data_comes_in_pairs(settings: Settings) -> Iterator[Problem]:
    """Names tell the metrics of several data sets apart."""
    words = settings.evaluation.eval_prompt_data or ()
    names = [name for name, _ in named_eval_files(settings)]
    if (len(words) > 1 and len(words) % 2) or len(set(names)) < len(names):
        yield problem(
            settings,
            "--eval-prompt-data",
            allowed="one path, or NAME PATH NAME PATH ... with different names",
            reason="Names tell the metrics of the data sets apart.",
            next_step="Give each path a name of its own.",
        )


def evaluation_scores_single_samples(settings: Settings) -> Iterator[Problem]:
    """Evaluation has no groups that a group reward could be called with."""
    evaluation = settings.evaluation
    flag = "--eval-interval" if evaluation.eval_interval is not None else "--eval-prompt-data"
    if settings.rollout.group_rm and (evaluation.eval_interval is not None or evaluates(settings)):
        yield problem(
            settings,
            f"--group-rm {flag}",
            allowed="one of them",
            reason="Evaluation scores sample by sample.",
            next_step="Leave out --group-rm, or evaluate in another run.",
        )


def evaluation_has_engines(settings: Settings) -> Iterator[Problem]:
    """Fine-tuning on records generates nothing."""
    if settings.objective.is_supervised and evaluates(settings):
        flag = "--eval-config" if settings.evaluation.eval_config is not None else "--eval-prompt-data"
        yield problem(
            settings,
            f"{flag} --loss-type",
            allowed="no evaluation data with --loss-type sft_loss",
            reason="Such a run has no engines that could answer.",
            next_step="Leave it out, and evaluate what was trained with --num-rollout 0 and another --loss-type.",
        )


def evaluation_functions_evaluate(settings: Settings) -> Iterator[Problem]:
    """The stream of rollouts has no end that an evaluation could wait for."""
    if settings.evaluation.eval_function_path == FULLY_ASYNC:
        yield problem(
            settings,
            "--eval-function-path",
            allowed="vime.rollout.vllm_rollout.generate_rollout, or a function of your own",
            reason="That function makes rollouts only.",
            next_step="Leave it out for vime's own evaluation.",
        )


def evaluation_leaves_room_for_a_response(settings: Settings) -> Iterator[Problem]:
    """A prompt as long as the context leaves no token for the response."""
    evaluation = settings.evaluation
    prompt, context = evaluation.eval_max_prompt_len, evaluation.eval_max_context_len
    if prompt is not None and context is not None and prompt > context - 1:
        yield problem(
            settings,
            "--eval-max-prompt-len --eval-max-context-len",
            allowed=f"{context - 1} or less",
            reason="A response needs at least one token.",
            next_step="Lower --eval-max-prompt-len or leave it out.",
        )


def evaluation_lengths_are_ordered(settings: Settings) -> Iterator[Problem]:
    """The engine refuses a minimum above the maximum."""
    evaluation = settings.evaluation
    longest = evaluation.eval_max_response_len or settings.rollout.rollout_max_response_len
    shortest = evaluation.eval_min_new_tokens
    if shortest is not None and longest is not None and shortest > longest:
        yield problem(
            settings,
            "--eval-min-new-tokens --eval-max-response-len",
            found=f"--eval-min-new-tokens is {shortest}, a response may have {longest} tokens",
            allowed=f"{longest} or less",
            reason="A response can't be longer than its limit.",
            next_step="Lower --eval-min-new-tokens or raise --eval-max-response-len.",
        )


RULES = (
    evaluation_has_data,
    a_run_without_training_evaluates,
    evaluation_has_engines,
    evaluation_functions_evaluate,
    evaluation_data_is_used,
    evaluation_data_comes_in_pairs,
    evaluation_scores_single_samples,
    evaluation_leaves_room_for_a_response,
    evaluation_lengths_are_ordered,
)
