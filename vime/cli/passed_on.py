"""Names of the flags that are passed on, before anything starts."""

from __future__ import annotations

from vime.backends.vllm_utils.arguments import check_engine_args, split_vllm_flags, unlisted_options
from vime.backends.vllm_utils.launch import user_options
from vime.backends.vllm_utils.router_arguments import check_router_args
from vime.errors import SettingsError
from vime.settings.extra_args import flags_added_by
from vime.settings.groups import Settings
from vime.settings.passed_on import listed_megatron_flags, unknown_flags


def check_passed_on(settings: Settings) -> None:
    """Check the flags for vLLM, the router and Megatron. Only a name that no list has makes vLLM or Megatron load.

    Raises:
        SettingsError: a flag that nobody knows, with the nearest one, or one that vime sets itself.
    """
    words, _ = split_vllm_flags(settings.vllm_args)
    user_options(words)
    if unlisted_options(words):
        check_engine_args(words)
    check_router_args(settings.router_args)
    _check_megatron(settings)


def _check_megatron(settings: Settings) -> None:
    path = settings.trainer.extra_args_provider_path
    known = listed_megatron_flags() | (frozenset() if path is None else frozenset(flags_added_by(path)))
    unknown = unknown_flags(settings, known)
    if not unknown:
        return
    for flag in unknown:
        for prefix in ("vllm", "router"):
            if flag.startswith(f"--no-{prefix}-"):
                meant = f"--{prefix}-no-{flag.removeprefix(f'--no-{prefix}-')}"
                raise SettingsError(f"{flag} is not a flag; the nearest one is {meant}.", next_step="Correct the flag.")
    from vime.backends.megatron_utils.arguments import known_megatron_flags

    for flag, nearest in unknown_flags(settings, known | known_megatron_flags()).items():
        raise SettingsError(
            f"{flag} is a flag neither of vime nor of the installed Megatron; the nearest one is {nearest}.",
            next_step="Correct or remove the flag.",
        )
