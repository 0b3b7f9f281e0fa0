"""`--router-*` flags: every option of vllm-router, passed through under a prefix."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from vime.errors import SettingsError
from vime.settings.owned_options import OWNED_ROUTER_OPTIONS, option_name
from vime.settings.passed_on import nearest_words

PREFIX = "--router-"


def check_router_args(words: Sequence[str]) -> None:
    """Check names and values of `--router-*` flags with the parser of the installed vllm-router.

    Raises:
        SettingsError: vllm-router isn't installed; an option that vime sets itself; an unknown name, with the nearest
            one; a value that the router refuses.
    """
    if not words:
        return
    parser = _router_parser()
    known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith(PREFIX)]
    for word in words:
        flag = word.partition("=")[0]
        if not word.startswith("--"):
            continue
        owned = option_name(flag.removeprefix(PREFIX))
        if owned in OWNED_ROUTER_OPTIONS:
            raise SettingsError(
                f"{flag} can't be set: vime sets the router's --{owned} itself.",
                next_step=f"Remove the flag. {OWNED_ROUTER_OPTIONS[owned]}",
            )
        if flag not in known:
            raise SettingsError(
                f"{flag} is not an option of this vllm-router{nearest_words(flag, known)}.",
                next_step="`vime train --help-router` lists them.",
            )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parser.parse_args(list(words))
    except SystemExit as error:
        said = complaint.getvalue().strip().splitlines() or ["no reason given"]
        raise SettingsError(
            f"vllm-router refuses {' '.join(words)}: {said[-1]}.", next_step="Correct the value."
        ) from error


def router_options_of(words: Sequence[str]) -> tuple[str, ...]:
    """`--router-*` flags as the router itself has them: without the prefix."""
    return tuple("--" + word.removeprefix(PREFIX) if word.startswith(PREFIX) else word for word in words)


def router_options() -> list[tuple[str, str]]:
    """Flag (with the prefix) and help of every option of the installed router that a user may set, sorted."""
    return sorted(
        (flag, action.help or "")
        for action in _router_parser()._actions
        for flag in action.option_strings
        if flag.startswith(PREFIX) and option_name(flag.removeprefix(PREFIX)) not in OWNED_ROUTER_OPTIONS
    )


def _router_parser() -> argparse.ArgumentParser:
    try:
        from vllm_router.router_args import RouterArgs
    except ImportError as error:
        raise SettingsError(
            f"--router-* flags need vllm-router: {error}.", next_step="pip install vllm-router"
        ) from error
    parser = argparse.ArgumentParser(prog="vllm-router", add_help=False, allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    return parser
