"""Rules on flags that are passed on to Megatron."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem
from vime.settings.rules.quantities import model_parallel_size, option, size

_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _EXPERT, _EXPERT_TENSOR = (
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
SAVED_SCHEDULE, _OWN_SCHEDULE = "--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler"
SIZES = (_TENSOR, _PIPELINE, _CONTEXT, _EXPERT, _EXPERT_TENSOR)
"""Flags that say over how many ranks one replica is spread."""


def parallel_sizes_are_counts(settings: Settings) -> Iterator[Problem]:
    """Megatron's own parser says so after seconds, for the first one only."""
    for flag in SIZES:
        value = option(settings.megatron_args, flag)
        if value is not None and not (value.isascii() and value.isdigit() and int(value) > 0):
            yield Problem(
                (flag,),
                f"{flag} is {value!r}",
                "a whole number, 1 or more",
                "It is a number of ranks.",
                "Correct the value.",
            )


def a_replica_divides_the_ranks(settings: Settings) -> Iterator[Problem]:
    """Data-parallel replicas are equal, so tensor x pipeline x context ranks must divide the trainer's."""
    ranks, replica = settings.cluster.num_trainer_ranks, model_parallel_size(settings)
    if ranks % replica:
        words = settings.megatron_args
        yield Problem(
            (_TENSOR, _PIPELINE, _CONTEXT, "--actor-num-nodes", "--actor-num-gpus-per-node"),
            f"{_TENSOR} {size(words, _TENSOR)} x {_PIPELINE} {size(words, _PIPELINE)} x {_CONTEXT} "
            f"{size(words, _CONTEXT)} = {replica} with {ranks} trainer ranks",
            f"sizes whose product divides {ranks}",
            "Data-parallel replicas are equal.",
            "Change the sizes, --actor-num-nodes or --actor-num-gpus-per-node.",
        )


def expert_ranks_divide_the_ranks(settings: Settings) -> Iterator[Problem]:
    """Experts have a layout of their own over the same ranks."""
    words, ranks = settings.megatron_args, settings.cluster.num_trainer_ranks
    if option(words, _EXPERT) is None and option(words, _EXPERT_TENSOR) is None:
        return
    tensor = size(words, _TENSOR if option(words, _EXPERT_TENSOR) is None else _EXPERT_TENSOR)
    product = size(words, _EXPERT) * tensor * size(words, _PIPELINE)
    if ranks % product:
        yield Problem(
            (_EXPERT, _EXPERT_TENSOR, _PIPELINE, "--actor-num-nodes", "--actor-num-gpus-per-node"),
            f"{_EXPERT} {size(words, _EXPERT)} x expert tensor size {tensor} x {_PIPELINE} {size(words, _PIPELINE)} = "
            f"{product} with {ranks} trainer ranks",
            f"sizes whose product divides {ranks}",
            f"The expert tensor size is {_EXPERT_TENSOR}, or {_TENSOR} when left out.",
            "Change the sizes, --actor-num-nodes or --actor-num-gpus-per-node.",
        )


def one_precision_is_asked_for(settings: Settings) -> Iterator[Problem]:
    """Parameters have one type."""
    if option(settings.megatron_args, "--bf16") is not None and option(settings.megatron_args, "--fp16") is not None:
        yield Problem(
            ("--bf16", "--fp16"),
            "--bf16 with --fp16",
            "one of them",
            "Parameters have one type.",
            "Leave out --fp16.",
        )


def a_resume_takes_one_schedule(settings: Settings) -> Iterator[Problem]:
    """The checkpoint's, or the flags'."""
    given = [option(settings.megatron_args, flag) for flag in (SAVED_SCHEDULE, _OWN_SCHEDULE)]
    if None not in given:
        yield Problem(
            (SAVED_SCHEDULE, _OWN_SCHEDULE),
            f"{SAVED_SCHEDULE} with {_OWN_SCHEDULE}",
            "one of them",
            "A resume goes on with the checkpoint's schedule or with that of the flags.",
            f"Leave out {_OWN_SCHEDULE}: without either of them the flags count.",
        )


RULES = (
    parallel_sizes_are_counts,
    a_replica_divides_the_ranks,
    expert_ranks_divide_the_ranks,
    one_precision_is_asked_for,
    a_resume_takes_one_schedule,
)
