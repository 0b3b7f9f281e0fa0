"""Names of the flags that are passed on, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from vime.backends.vllm_utils.arguments import split_vllm_flags, unknown_options
from vime.backends.vllm_utils.router_arguments import check_router_args
from vime.errors import SettingsError
from vime.settings.extra_args import flags_added_by
from vime.settings.groups import Settings
from vime.settings.passed_on import is_of_sglang, listed_megatron_flags, unknown_flags, vllm_flag_of
from vime.settings.rules.problem import Problem, problem_of


def passed_on_problems(settings: Settings) -> Iterator[Problem]:
    """Flags for Megatron, vLLM and the router that nobody knows, and values that the router refuses.

    Only a name that no list has makes Megatron or vLLM load, which takes seconds.
    """
    yield from _megatron_problems(settings)
    for flag, nearest in unknown_options(split_vllm_flags(settings.vllm_args)[0]).items():
        yield _unknown(flag, "is not an option of the installed vLLM", nearest)
    try:
        check_router_args(settings.router_args)
    except SettingsError as error:
        yield problem_of("--router-*", error)


def _megatron_problems(settings: Settings) -> Iterator[Problem]:
    path = settings.trainer.extra_args_provider_path
    known = listed_megatron_flags() | (frozenset() if path is None else frozenset(flags_added_by(path)))
    unlisted = unknown_flags(settings, known)
    misplaced = {flag: meant for flag in unlisted if (meant := _prefix_first(flag)) is not None}
    if set(unlisted) > set(misplaced):
        from vime.backends.megatron_utils.arguments import known_megatron_flags

        unlisted = unknown_flags(settings, known | known_megatron_flags())
    for flag, nearest in unlisted.items():
        if is_of_sglang(flag):
            yield _of_sglang(flag)
            continue
        found = "is a flag neither of vime nor of the installed Megatron"
        yield _unknown(flag, found, misplaced.get(flag, nearest))


def _of_sglang(flag: str) -> Problem:
    meant = vllm_flag_of(flag)
    near = meant and f"The nearest one is {meant}."
    allowed = "flags of vime's engine, which is vLLM, each with --vllm- before its name"
    return Problem(
        (flag,), f"{flag} is a flag of SGLang", allowed, near, "Replace it; --help-vllm lists what there is."
    )


def _prefix_first(flag: str) -> str | None:
    """`--vllm-no-x` for `--no-vllm-x`, the same for the router; None for other flags."""
    for prefix in ("vllm", "router"):
        if flag.startswith(f"--no-{prefix}-"):
            return f"--{prefix}-no-{flag.removeprefix(f'--no-{prefix}-')}"
    return None


def _unknown(flag: str, found: str, nearest: str) -> Problem:
    near = nearest and f"The nearest one is {nearest}."
    return Problem((flag,), f"{flag} {found}", "a known flag", near, "Correct or remove the flag.")
