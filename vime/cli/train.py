"""`vime train`: help, dry run, and the start of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.cli.passed_on import check_passed_on
from vime.settings.parser import build_parser
from vime.settings.passed_on import own_flag_names
from vime.settings.record import settings_record
from vime.settings.resolve import Resolved, resolve
from vime.settings.validate import validate
from vime.versions import check_versions


def train(words: list[str]) -> int:
    """Run `vime train`; the exit status."""
    return 0 if print_help(words) else start(resolve(words))


def print_help(words: Sequence[str]) -> bool:
    """Print the help that `words` ask for; whether they ask for one."""
    if "-h" in words or "--help" in words:
        build_parser(common_first=True).print_help()
    elif "--help-megatron" in words or "--help-vllm" in words or "--help-router" in words:
        _print_options(_options(words))
    else:
        return False
    return True


def start(resolved: Resolved) -> int:
    """Check the settings and run, or with --dry-run print them; the exit status."""
    if resolved.settings.command.dry_run:
        return _dry_run(resolved)
    check_versions()
    validate(resolved.settings)
    check_passed_on(resolved.settings)
    from pipeline.progress import ProgressView
    from pipeline.run import run_training

    with ProgressView() as view:
        return run_training(resolved, view)


def _dry_run(resolved: Resolved) -> int:
    for warning in validate(resolved.settings, dry_run=True):
        print(f"warning: {warning}", file=sys.stderr)
    check_passed_on(resolved.settings)
    print(settings_record(resolved).decode())
    return 0


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
