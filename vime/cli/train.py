"""`vime train`: help, dry run, and the start of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence

from vime.cli.exit_codes import ExitCode, exit_codes_help
from vime.cli.this_machine import this_machine
from vime.errors import SettingsError
from vime.settings.parser import build_parser
from vime.settings.passed_on import listed_megatron_flags, own_flag_names, unknown_flags
from vime.settings.resolve import Resolved, resolve
from vime.settings.rules.problem import Problem
from vime.settings.validate import validate
from vime.versions import check_versions


def train(words: list[str]) -> int:
    """Run `vime train`; the exit status."""
    if "-h" in words or "--help" in words:
        parser = build_parser(common_first=True)
        parser.epilog = f"{parser.epilog}\n{exit_codes_help()}"
        parser.print_help()
        return 0
    if "--help-megatron" in words or "--help-vllm" in words:
        _print_options(_megatron_options() if "--help-megatron" in words else _vllm_options())
        return 0
    resolved = resolve(words)
    if resolved.settings.command.dry_run:
        return _dry_run(resolved)
    _refuse_alone(resolved)
    check_versions()
    _warn(validate(resolved.settings, machine=this_machine(), more=_other_problems(resolved)))
    from pipeline.interrupt import Ending
    from pipeline.progress import ProgressView
    from pipeline.run import run_training

    with ProgressView() as view:
        ending = run_training(resolved, view)
    return ExitCode.DONE if ending is Ending.DONE else ExitCode.INTERRUPTED


def _dry_run(resolved: Resolved) -> int:
    # A dry run may happen where the GPUs are not; it says itself whether they suffice.
    machine = dataclasses.replace(this_machine(), nodes=None)
    warnings = validate(resolved.settings, dry_run=True, machine=machine, more=_other_problems(resolved))
    from vime.cli.dry_run import dry_run

    return dry_run(resolved, warnings)


def _refuse_alone(resolved: Resolved) -> None:
    """Flags that mean nothing without --dry-run."""
    for field, name in (("json", "--json"), ("assume_gpus", "--assume-gpus")):
        if resolved.is_given(field):
            raise SettingsError(f"{name} goes with --dry-run only.", next_step="Add --dry-run or leave it out.")


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _other_problems(resolved: Resolved) -> list[Problem]:
    """What only code outside of the settings can tell: flags of Megatron, and the user's hooks."""
    from vime.rollout.hooks import hook_problems

    return [*_unknown_flags(resolved), *hook_problems(resolved.settings)]


def _unknown_flags(resolved: Resolved) -> Iterator[Problem]:
    """Flags that neither the listed nor the installed Megatron knows. The latter is imported only when in doubt."""
    if not unknown_flags(resolved.settings, listed_megatron_flags()):
        return
    from vime.backends.megatron_utils.arguments import known_megatron_flags

    for flag, nearest in unknown_flags(resolved.settings, known_megatron_flags()).items():
        yield Problem(
            (flag,),
            f"{flag} is a flag neither of vime nor of the installed Megatron",
            "a known flag",
            f"The nearest one is {nearest}.",
            "Correct or remove the flag.",
        )


def _megatron_options() -> list[tuple[str, str]]:
    from vime.backends.megatron_utils.arguments import megatron_options

    return [(name, help) for name, help in megatron_options() if name not in own_flag_names()]


def _vllm_options() -> list[tuple[str, str]]:
    from vime.backends.vllm_utils.arguments import engine_options

    return [(name, help) for name, help in engine_options() if name not in own_flag_names()]


def _print_options(options: Sequence[tuple[str, str]]) -> None:
    for name, help in options:
        print(f"  {name}\n      {help}" if help else f"  {name}")
