"""Checks between flags: what can't work is refused in the first second, with one next step."""

from __future__ import annotations

import json
from pathlib import Path

from vime.errors import SettingsError
from vime.models.shape import refuse_contradictions
from vime.settings.groups import Settings
from vime.settings.refusals import refused
from vime.settings.schemas.named_files import check_named_files

SUPPORTED_MODEL_TYPES = ("qwen3",)


def validate(settings: Settings, *, dry_run: bool = False) -> list[str]:
    """Check the settings against each other and against what is built. Reads small local files only.

    Returns warnings: those about the files that settings name and, in a dry run, what a real start would refuse
    because it isn't built yet (see `vime.settings.refusals`).

    Raises:
        SettingsError: a combination that can't work or, unless `dry_run`, a setting that isn't built yet.
    """
    _require_flags(settings)
    _check_batches(settings)
    _check_cluster(settings)
    _check_model(settings)
    warnings = check_named_files(settings)
    unfinished = refused(settings)
    if dry_run:
        return [*unfinished, *warnings]
    _refuse(unfinished)
    return warnings


def _require_flags(settings: Settings) -> None:
    required = {
        "--hf-checkpoint": settings.checkpoint.hf_checkpoint,
        "--prompt-data": settings.data.prompt_data,
        "--num-rollout": settings.data.num_rollout,
        "--rollout-batch-size": settings.data.rollout_batch_size,
        "--rollout-max-response-len": settings.rollout.rollout_max_response_len,
    }
    missing = [name for name, value in required.items() if value is None]
    if missing:
        raise SettingsError(f"Missing: {', '.join(missing)}.", next_step="Give each a value.")
    if settings.rollout.rm_type is None and settings.rollout.custom_rm_path is None:
        raise SettingsError("No reward is named.", next_step="Give --rm-type or --custom-rm-path.")
    if settings.checkpoint.save is None:
        raise SettingsError(
            "No run folder is named; checkpoints, queue, logs and metrics need one.", next_step="Give --save DIR."
        )


def _check_batches(settings: Settings) -> None:
    data, trainer = settings.data, settings.trainer
    if data.samples_per_rollout % data.samples_per_step:
        raise SettingsError(
            f"--global-batch-size is {data.samples_per_step}, but a rollout batch has {data.rollout_batch_size} x "
            f"{data.n_samples_per_prompt} = {data.samples_per_rollout} samples; allowed: a divisor of that.",
            next_step="Change one of the three.",
        )
    if trainer.use_dynamic_batch_size and trainer.max_tokens_per_gpu is None:
        raise SettingsError("--use-dynamic-batch-size needs a token limit.", next_step="Give --max-tokens-per-gpu N.")
    limit = settings.queue.rollout_queue_max_groups
    if limit is not None and data.rollout_batch_size is not None and limit < data.rollout_batch_size:
        raise SettingsError(
            f"--rollout-queue-max-groups is {limit}, so a rollout batch of {data.rollout_batch_size} groups would "
            "never be complete.",
            next_step=f"Give {data.rollout_batch_size} or more.",
        )


def _check_cluster(settings: Settings) -> None:
    cluster = settings.cluster
    if cluster.num_rollout_gpus % cluster.rollout_num_gpus_per_engine:
        raise SettingsError(
            f"--rollout-num-gpus is {cluster.num_rollout_gpus}, --rollout-num-gpus-per-engine is "
            f"{cluster.rollout_num_gpus_per_engine}; allowed: a multiple.",
            next_step="Change one of the two.",
        )
    if cluster.num_engines == 0:
        raise SettingsError(
            "--rollout-num-gpus 0 starts no engine, and engines of others can't be connected in this version.",
            next_step="Give 1 or more.",
        )
    if settings.data.samples_per_step < cluster.num_trainer_ranks:
        raise SettingsError(
            f"An optimizer step has {settings.data.samples_per_step} samples for {cluster.num_trainer_ranks} trainer "
            "ranks; allowed: at least one each.",
            next_step="Lower --actor-num-gpus-per-node or raise the batch.",
        )


def _check_model(settings: Settings) -> None:
    folder = Path(settings.checkpoint.hf_checkpoint or "")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise SettingsError(
            f"--hf-checkpoint {folder}: no config.json there.",
            next_step="Name a Hugging Face folder on this machine (models are not downloaded).",
        )
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise SettingsError(f"{config_path}: not JSON ({error}).", next_step="Restore the file.") from error
    found = config.get("model_type")
    if found not in SUPPORTED_MODEL_TYPES:
        raise SettingsError(
            f"{config_path}: model_type is {found!r}, allowed: {', '.join(SUPPORTED_MODEL_TYPES)}.",
            next_step="Choose a model of an allowed type.",
        )
    refuse_contradictions(config, settings.megatron_args)


def _refuse(sentences: list[str]) -> None:
    if len(sentences) == 1:
        raise SettingsError(sentences[0], next_step="Change or leave out the flag.")
    if sentences:
        raise SettingsError("\n".join(["Not built yet:", *sentences]), next_step="Change or leave out these flags.")
