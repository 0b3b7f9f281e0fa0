"""Documented settings that the code can't honour yet. They are refused, never accepted and ignored.

A row leaves this table in the change that builds what it needs.
"""

from __future__ import annotations

from vime.models.families import family_of
from vime.models.weight_names import RUN_MODEL_TYPES
from vime.settings.groups import Settings
from vime.settings.refusal import Refusal, unless_default
from vime.settings.rules.json_files import model_config


def refused(settings: Settings) -> list[str]:
    """One sentence for each setting that can't be honoured: flag, value, what is allowed, and why."""
    return [
        f"{row.flag}{value and ' ' + value} is not built yet, allowed: {row.accepted}. {row.reason}"
        for row in REFUSALS
        if (value := row.found(settings)) is not None
    ]


def _unsupported_model(settings: Settings) -> str | None:
    """Path of the checkpoint and type of its model, when it is one that can be described but not trained yet."""
    family = family_of(model_config(settings))
    if family is None or family in RUN_MODEL_TYPES:
        return None
    return f"{settings.checkpoint.hf_checkpoint} (model_type {family})"


REFUSALS: tuple[Refusal, ...] = (
    # Model
    Refusal(
        "--hf-checkpoint",
        f"a model of type {', '.join(RUN_MODEL_TYPES)}",
        "vime knows the shape of other models, but runs of them are not tested.",
        "training and publication of more model families",
        refused_value=_unsupported_model,
    ),
    # Placement
    Refusal("--actor-num-nodes", "1", "One node is what works so far.", "placement over several nodes"),
    Refusal(
        "--rollout-num-gpus-per-engine",
        "1",
        "Engines of one worker are what work so far.",
        "engines of several workers",
    ),
    Refusal(
        "--rollout-num-gpus",
        "1 or more",
        "0 starts no engine, and engines that others register with a router can't be used.",
        "engines of others behind a router",
        refused_value=lambda settings: (
            0 if settings.cluster.rollout_num_gpus == 0 and not settings.objective.is_supervised else None
        ),
    ),
    *unless_default(
        "--colocate --offload --offload-rollout",
        "Engines keep their own devices.",
        "memory hand-over between trainer and engines",
    ),
    *unless_default(
        "--release-train",
        "Weights travel through collectives, for which the trainer's processes stay.",
        "the disk transport",
    ),
    *unless_default("--num-gpus-per-node", "One node is what works so far.", "placement over several nodes"),
    # Engines and router
    *unless_default(
        "--vllm-config --prefill-num-servers",
        "One model on equal engines is what works so far.",
        "server groups and several models",
    ),
    *unless_default(
        "--rollout-external-engine-addrs --use-fault-tolerance",
        "vime uses the engines that it starts.",
        "connecting to engines of others",
    ),
    *unless_default(
        "--rollout-health-check-interval --rollout-health-check-timeout --rollout-health-check-first-wait "
        "--rollout-cleanup-timeout",
        "An engine that dies ends the run; it is not checked at intervals and not restarted.",
        "engine health checks and restarts",
    ),
    *unless_default(
        "--vllm-router-ip --vllm-router-port", "The router is not part of this version.", "requests through a router"
    ),
    Refusal(
        "--router-*",
        "left out",
        "The router is not part of this version.",
        "requests through a router",
        refused_value=lambda settings: " ".join(settings.router_args) or None,
    ),
    # Prompts and batches
    *unless_default(
        "--buffer-filter-path", "The queue hands out groups, oldest policy version first.", "a buffer of one's own"
    ),
    Refusal(
        "--multimodal-keys",
        "left out, or with --custom-generate-function-path",
        "vime's own generation sends text.",
        "media in requests and training",
        refused_value=lambda settings: (
            None if settings.rollout.custom_generate_function_path else settings.data.multimodal_keys
        ),
    ),
    # Generation and rewards
    *unless_default(
        "--custom-convert-samples-to-train-data-path",
        "The hook is not called.",
        "rollout hooks",
    ),
    *unless_default("--use-distributed-post", "Producers send their own requests directly.", "a request forwarder"),
    # Objective
    *unless_default(
        "--opd-teacher-model",
        "All engines have the model that is trained; a teacher in an engine of someone else's works, with --rm-url.",
        "several models on vime's own engines",
    ),
    Refusal(
        "--opd-teacher-scoring",
        "prompt-logprobs",
        "A teacher in an engine scores a response in one request.",
        "one request for each position",
        accepts=("prompt-logprobs",),
    ),
    # Trainer and checkpoints
    *unless_default(
        "--mtp-num-layers --mtp-loss-scaling-factor",
        "The model is trained without heads for several tokens.",
        "conversion and training of heads for multi-token prediction",
    ),
    Refusal("--distributed-backend", "nccl", "The backend follows the device.", "gloo on GPUs"),
    *unless_default("--model-name", "The checkpoint's config names the model.", "weight conversions by name"),
    *unless_default("--start-rollout-id", "The commit tells where a run goes on.", "starts in the middle"),
    Refusal(
        "--no-save-optim",
        "left out, or with --use-stateless-adam",
        "A commit is whole.",
        "commits without the optimizer",
        refused_value=lambda settings: (
            "" if settings.checkpoint.no_save_optim and not settings.trainer.use_stateless_adam else None
        ),
    ),
    *unless_default("--async-save", "A commit is written at once.", "commits that are written in the background"),
    # Queue and weights
    *unless_default(
        "--rollout-io-concurrency",
        "A process reads and writes with as many threads as it needs.",
        "a bound on reads and writes in the pool",
    ),
    *unless_default("--rollout-session-id", "Engines end with their job.", "engines kept for a restarted job"),
    # Evaluation, debugging, logging
    *unless_default(
        "--debug-rollout-only --debug-train-only --save-debug-rollout-data --load-debug-rollout-data "
        "--load-debug-rollout-data-subsample --load-forge-rollout-data --save-debug-train-data --dump-details",
        "A run always generates and trains.",
        "debug modes and archives",
    ),
    *unless_default(
        "--ci-test --ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold --ci-save-grad-norm "
        "--ci-load-grad-norm --memory-recorder --memory-snapshot-dir --memory-snapshot-num-steps",
        "Nothing reads it.",
        "checks of continuous integration and memory recording",
    ),
    *unless_default(
        "--use-wandb --wandb-mode --wandb-dir --wandb-key --wandb-host --wandb-team --wandb-group --wandb-project "
        "--wandb-run-id --wandb-always-use-train-step --disable-wandb-random-suffix --use-tensorboard "
        "--tb-project-name --tb-experiment-name",
        "Metrics go to metrics.jsonl in the run folder.",
        "other metric sinks",
    ),
)
