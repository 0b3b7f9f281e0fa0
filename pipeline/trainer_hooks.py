"""From settings to the user's functions in the trainer."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from pipeline.user_functions import user_function
from vime.backends.megatron_utils.trainer_hooks import Hook, TrainerHooks
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs


def trainer_hooks(settings: Settings) -> TrainerHooks:
    """The functions that the settings name. Raises `SettingsError` for one that can't be loaded."""

    def args(megatron: argparse.Namespace) -> Any:
        values = vars(megatron)
        trainer = dataclasses.replace(settings.trainer, padded_vocab_size=megatron.padded_vocab_size)  # as it is used
        return HookArgs(dataclasses.replace(settings, trainer=trainer), lambda: values, values.keys())

    trainer = settings.trainer
    log_prob, step = (
        trainer.custom_megatron_before_log_prob_hook_path,
        trainer.custom_megatron_before_train_step_hook_path,
    )
    return TrainerHooks(
        args=args,
        model_provider=_hook("--custom-model-provider-path", trainer.custom_model_provider_path),
        init=_hook("--custom-megatron-init-path", trainer.custom_megatron_init_path),
        before_log_prob=_hook("--custom-megatron-before-log-prob-hook-path", log_prob),
        before_train_step=_hook("--custom-megatron-before-train-step-hook-path", step),
    )


def _hook(flag: str, path: str | None) -> Hook | None:
    return None if path is None else Hook(flag, path, user_function(flag, path))
