"""`vime train`: help, dry run, and the start of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from vime.cli.exit_codes import ExitCode, exit_codes_help
from vime.cli.passed_on import passed_on_problems
from vime.cli.this_machine import asks_for_devices, this_machine
from vime.errors import SettingsError, joined
from vime.settings.parser import build_parser
from vime.settings.passed_on import own_flag_names
from vime.settings.resolve import SETTINGS, Resolved, resolve_all
from vime.settings.rules.problem import Problem
from vime.settings.validate import error_of, file_refusals, refusals_of, validate
from vime.versions import check_versions


def train(words: list[str]) -> int:
    """Run `vime train`; the exit status."""
    return ExitCode.DONE if print_help(words) else start(_resolved(words))


def _resolved(words: Sequence[str]) -> Resolved:
    """Settings of the command line. Where some are wrong by themselves, what the others name is looked at as well.

    Raises:
        SettingsError: all that is wrong with single flags, and with the files and functions that the others name.
    """
    resolved, errors = resolve_all(words)
    if not errors:
        return resolved
    others = [*file_refusals(resolved.settings), *map(error_of, _other_problems(resolved))]
    raise joined([*errors, *others], SETTINGS)


def print_help(words: Sequence[str]) -> bool:
    """Print the help that `words` ask for; whether they ask for one."""
    if "-h" in words or "--help" in words:
        parser = build_parser(common_first=True)
        parser.epilog = f"{parser.epilog}\n{exit_codes_help()}"
        print(parser.format_help(), end="")
    elif "--help-megatron" in words or "--help-vllm" in words or "--help-router" in words:
        _print_options(_options(words))
    else:
        return False
    return True


def start(resolved: Resolved) -> int:
    """Check the settings and run, or with --dry-run say what a run would do; the exit status."""
    if resolved.settings.command.dry_run:
        return _dry_run(resolved)
    _refuse_alone(resolved)
    check_versions()
    from pipeline.transports.nixl_probe import nixl_problems

    problems = [*_other_problems(resolved), *nixl_problems(resolved.settings)]
    machine = this_machine()
    if not asks_for_devices(resolved):
        machine = dataclasses.replace(machine, nodes=None)
    _warn(validate(resolved.settings, machine=machine, more=problems))
    from pipeline.interrupt import Ending
    from pipeline.progress import ProgressView
    from pipeline.run import run_training

    with ProgressView() as view:
        ending = run_training(resolved, view)
    return ExitCode.DONE if ending is Ending.DONE else ExitCode.INTERRUPTED


def _dry_run(resolved: Resolved) -> int:
    # A dry run may happen where the GPUs are not; it says itself whether they suffice.
    machine = dataclasses.replace(this_machine(), nodes=None)
    settings, more = resolved.settings, _other_problems(resolved)
    from pipeline.transports.nixl_probe import nixl_problems
    from vime.cli.dry_run import data_problems, dry_run

    errors = refusals_of(settings, dry_run=True, machine=machine, more=more)
    if errors:
        raise joined([*errors, *data_problems(resolved)], SETTINGS)
    warnings = validate(settings, dry_run=True, machine=machine, more=more)

    return dry_run(resolved, [*warnings, *map(str, nixl_problems(resolved.settings))])


def _refuse_alone(resolved: Resolved) -> None:
    """Flags that mean nothing without --dry-run."""
    for field, name in (("json", "--json"), ("assume_gpus", "--assume-gpus")):
        if resolved.is_given(field):
            raise SettingsError(f"{name} goes with --dry-run only.", next_step="Add --dry-run or leave it out.")


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _other_problems(resolved: Resolved) -> list[Problem]:
    """What only code outside of the settings can tell: flags that are passed on, and the user's hooks."""
    from vime.rollout.hooks import hook_problems

    return [*passed_on_problems(resolved.settings), *hook_problems(resolved.settings)]


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    """Flag and help of what is passed on to Megatron, vLLM or the router."""
    if "--help-megatron" in words:
        from vime.backends.megatron_utils.arguments import megatron_options as options
    elif "--help-vllm" in words:
        from vime.backends.vllm_utils.arguments import engine_options as options
    else:
        from vime.backends.vllm_utils.router_arguments import router_options as options
    return [(name, help) for name, help in options() if name not in own_flag_names()]


def _print_options(options: Sequence[tuple[str, str]]) -> None:
    for name, help in options:
        print(f"  {name}\n      {help}" if help else f"  {name}")
