"""Rules on batch arithmetic: rollout batch, optimizer step, ranks, microbatches, tokens."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import (
    STREAMS,
    context_parallel_size,
    data_parallel_size,
    is_stream,
    longest_sequence,
    num_rollout_gpus,
)


def steps_divide_the_batch(settings: Settings) -> Iterator[Problem]:
    """Samples that fill no step would be dropped each time; the reference drops them."""
    data = settings.data
    if data.global_batch_size is not None and data.samples_per_rollout % data.global_batch_size:
        yield problem(
            settings,
            "--global-batch-size --rollout-batch-size --n-samples-per-prompt",
            found=(
                f"--global-batch-size is {data.global_batch_size}, but a rollout batch has {data.rollout_batch_size} x "
                f"{data.n_samples_per_prompt} = {data.samples_per_rollout} samples"
            ),
            allowed="a divisor of that",
            reason="Samples that fill no optimizer step would be thrown away.",
            next_step="Change one of the three.",
        )


def number_of_steps_divides_the_batch(settings: Settings) -> Iterator[Problem]:
    """As for --global-batch-size."""
    data = settings.data
    steps = data.num_steps_per_rollout
    if steps is not None and data.samples_per_rollout % steps:
        yield problem(
            settings,
            "--num-steps-per-rollout --rollout-batch-size --n-samples-per-prompt",
            found=f"--num-steps-per-rollout is {steps}, but a rollout batch has {data.samples_per_rollout} samples",
            allowed="a divisor of that",
            reason="Every optimizer step has as many samples.",
            next_step="Change one of the three.",
        )


def step_size_is_given_once(settings: Settings) -> Iterator[Problem]:
    """--global-batch-size and --num-steps-per-rollout say the same thing in two ways, so they must agree."""
    data = settings.data
    if data.global_batch_size is None or data.num_steps_per_rollout is None:
        return
    if data.global_batch_size * data.num_steps_per_rollout != data.samples_per_rollout:
        yield problem(
            settings,
            "--global-batch-size --num-steps-per-rollout",
            allowed=f"one of them, or a product of {data.samples_per_rollout}",
            reason="Steps times samples of a step are the samples of a rollout batch.",
            next_step="Leave out one of the two.",
        )


def over_sampling_covers_the_batch(settings: Settings) -> Iterator[Problem]:
    """Fewer groups than a batch needs can never fill it in one go."""
    data = settings.data
    over, batch = data.over_sampling_batch_size, data.rollout_batch_size
    if over is not None and batch is not None and over < batch:
        yield problem(
            settings,
            "--over-sampling-batch-size --rollout-batch-size",
            allowed=f"{batch} or more",
            reason="A batch is chosen from what is sampled.",
            next_step="Raise --over-sampling-batch-size or leave it out.",
        )


def every_rank_gets_a_sample(settings: Settings) -> Iterator[Problem]:
    """A data-parallel replica without samples would have no microbatch while the others communicate."""
    samples, replicas = settings.data.samples_per_step, data_parallel_size(settings)
    if 0 < samples < replicas:
        yield problem(
            settings,
            "--actor-num-gpus-per-node --global-batch-size --rollout-batch-size",
            found=f"An optimizer step has {samples} samples for {replicas} trainer ranks that share it",
            allowed="at least one each",
            reason="Each rank needs a microbatch.",
            next_step="Lower --actor-num-gpus-per-node or raise the batch.",
        )


def fixed_microbatches_divide_the_step(settings: Settings) -> Iterator[Problem]:
    """Without dynamic batches every replica runs as many microbatches of as many samples."""
    trainer, samples = settings.trainer, settings.data.samples_per_step
    replicas = data_parallel_size(settings)
    unit = replicas * trainer.micro_batch_size
    if not trainer.use_dynamic_batch_size and samples >= replicas and samples % unit:
        yield problem(
            settings,
            "--micro-batch-size --global-batch-size --actor-num-gpus-per-node",
            found=f"An optimizer step has {samples} samples for {replicas} ranks x {trainer.micro_batch_size} samples "
            "(--micro-batch-size)",
            allowed=f"a multiple of {unit}",
            reason="Microbatches of a fixed size must come out even.",
            next_step="Give --use-dynamic-batch-size with --max-tokens-per-gpu, or change the batch.",
        )


def dynamic_batches_have_a_token_limit(settings: Settings) -> Iterator[Problem]:
    """A microbatch is filled up to a number of tokens."""
    if settings.trainer.use_dynamic_batch_size and settings.trainer.max_tokens_per_gpu is None:
        yield problem(
            settings,
            "--use-dynamic-batch-size --max-tokens-per-gpu",
            found="--use-dynamic-batch-size needs a token limit, --max-tokens-per-gpu is left out",
            allowed="a number of tokens",
            reason="Microbatches are filled up to it.",
            next_step="Give --max-tokens-per-gpu N.",
        )


def passes_are_no_smaller_than_training(settings: Settings) -> Iterator[Problem]:
    """Passes without gradients go through whole microbatches of the plan, one or several at once."""
    trainer = settings.trainer
    most, limit = trainer.log_probs_max_tokens_per_gpu, trainer.max_tokens_per_gpu
    if most is not None and limit is not None and most < limit:
        yield problem(
            settings,
            "--log-probs-max-tokens-per-gpu --max-tokens-per-gpu",
            allowed=f"{limit} or more",
            reason="A pass without gradients needs less memory than training, and takes whole microbatches.",
            next_step="Leave out --log-probs-max-tokens-per-gpu.",
        )


def balancing_work_needs_dynamic_batches(settings: Settings) -> Iterator[Problem]:
    """Work can only be balanced where the number of samples in a microbatch is free."""
    if settings.trainer.balance_by_flops and not settings.trainer.use_dynamic_batch_size:
        yield problem(
            settings,
            "--balance-by-flops --use-dynamic-batch-size",
            allowed="both",
            reason="Microbatches of a fixed number of samples leave nothing to balance.",
            next_step="Give --use-dynamic-batch-size and --max-tokens-per-gpu N.",
        )


def a_sequence_fits_the_token_limit(settings: Settings) -> Iterator[Problem]:
    """A sequence is never split between microbatches, so a longer one would run out of memory hours later."""
    trainer = settings.trainer
    if not trainer.use_dynamic_batch_size or trainer.max_tokens_per_gpu is None:
        return
    limit = trainer.max_tokens_per_gpu * context_parallel_size(settings)
    context = settings.rollout.rollout_max_context_len
    counted = settings.data.rollout_max_prompt_len is not None or context is not None
    longest = longest_sequence(settings) + (0 if counted else 1)
    if longest > limit:
        yield problem(
            settings,
            "--max-tokens-per-gpu --rollout-max-response-len --rollout-max-prompt-len",
            found=(
                f"Prompt and response may have {longest} tokens{'' if counted else ' with a prompt of one token'}, "
                f"--max-tokens-per-gpu {trainer.max_tokens_per_gpu} x "
                f"context parallel size {context_parallel_size(settings)} allows {limit}"
            ),
            allowed=f"{limit} or fewer tokens together",
            reason="A sequence is never split between microbatches.",
            next_step=f"Give --max-tokens-per-gpu {-(-longest // context_parallel_size(settings))} or more"
            f"{'' if counted else ', with the tokens of the longest prompt on top'}, or shorter sequences.",
        )


def the_queue_holds_a_batch(settings: Settings) -> Iterator[Problem]:
    """Producers pause at the limit, so a smaller one would stop the stream before its first batch."""
    limit, batch = settings.queue.rollout_queue_max_groups, settings.data.rollout_batch_size
    if limit is not None and batch is not None and limit < batch:
        yield problem(
            settings,
            "--rollout-queue-max-groups --rollout-batch-size",
            found=f"--rollout-queue-max-groups is {limit}, so a rollout batch of {batch} groups would never be "
            "complete",
            allowed=f"{batch} or more",
            reason="Producers pause at the limit.",
            next_step=f"Give {batch} or more.",
        )


def a_group_fits_the_requests_in_flight(settings: Settings) -> Iterator[Problem]:
    """--vllm-server-concurrency counts samples, and the members of a group are generated together by one producer."""
    per_engine = settings.rollout.vllm_server_concurrency
    members, producers = settings.data.n_samples_per_prompt, settings.queue.rollout_num_producers
    engines = max(1, num_rollout_gpus(settings) // settings.cluster.rollout_num_gpus_per_engine)
    if per_engine * engines < members * producers:
        yield problem(
            settings,
            "--vllm-server-concurrency --n-samples-per-prompt" + (" --rollout-num-producers" if producers > 1 else ""),
            found=f"--vllm-server-concurrency {per_engine} x {engines} engines with --n-samples-per-prompt {members}"
            + (f" x {producers} producers" if producers > 1 else ""),
            allowed=f"{members * producers} or more requests in all",
            reason="The limit counts samples, and the members of a group are generated together.",
            next_step="Raise --vllm-server-concurrency.",
        )


def several_producers_share_a_stream(settings: Settings) -> Iterator[Problem]:
    """A function that makes whole rollouts, one after another, sees all their groups."""
    if settings.queue.rollout_num_producers > 1 and not is_stream(settings):
        yield problem(
            settings,
            "--rollout-num-producers --rollout-function-path --rollout-all-samples-process-path",
            allowed=f"one producer, or a rollout function of {', '.join(STREAMS)} and no function on all samples",
            reason="One process makes a whole rollout.",
            next_step="Leave out --rollout-num-producers.",
        )


RULES = (
    steps_divide_the_batch,
    number_of_steps_divides_the_batch,
    step_size_is_given_once,
    over_sampling_covers_the_batch,
    every_rank_gets_a_sample,
    fixed_microbatches_divide_the_step,
    dynamic_batches_have_a_token_limit,
    passes_are_no_smaller_than_training,
    balancing_work_needs_dynamic_batches,
    a_sequence_fits_the_token_limit,
    the_queue_holds_a_batch,
    a_group_fits_the_requests_in_flight,
    several_producers_share_a_stream,
)
