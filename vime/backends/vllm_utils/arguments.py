"""`--vllm-*` flags: every option of vLLM's server, passed through under a prefix."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.resources
import io
import json
from collections.abc import Sequence

from vime.backends.vllm_utils.launch import user_options
from vime.errors import SettingsError
from vime.settings.owned_options import OWNED_VLLM_OPTIONS, option_name

_PREFIX = "--vllm-"

VLLM_FLAGS_FILE = "vllm_flags.json"
"""Data file with vLLM's options, made by `scripts/list_vllm_flags.py`."""


def split_vllm_flags(argv: Sequence[str], reserved: frozenset[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Split a command line into vLLM's options, prefix removed, and the rest; order is kept on both sides.

    An option takes the words after it up to the next one that starts with `--`. `reserved` names flags of vime's own
    that begin with `--vllm-` (for example `--vllm-router-ip`); they stay in the rest.
    """
    engine: list[str] = []
    rest: list[str] = []
    target = rest
    for word in argv:
        if word.startswith("--"):
            is_engine = word.startswith(_PREFIX) and word.partition("=")[0] not in reserved
            target = engine if is_engine else rest
            target.append("--" + word.removeprefix(_PREFIX) if is_engine else word)
        else:
            target.append(word)
    return engine, rest


def check_engine_args(engine_args: Sequence[str]) -> None:
    """Check names and values with vLLM's own parser, which is imported here (some seconds).

    Raises `SettingsError` for an option that vime sets itself, an unknown name (with the nearest known one) or a value
    that vLLM refuses.
    """
    user_options(engine_args)
    parser = _vllm_parser()
    known = known_options()
    for word in engine_args:
        name = "--" + word[2:].partition("=")[0].partition(".")[0].replace("_", "-")
        if word.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {_PREFIX}{near[0][2:]}?" if near else "See `vllm serve --help` for the names."
            raise SettingsError(f"{_PREFIX}{name[2:]} is not an option of this vLLM.", next_step=hint)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parser.parse_args(list(engine_args))
    except (SystemExit, ValueError, TypeError) as error:
        lines = complaint.getvalue().strip().splitlines() or [str(error)]
        raise SettingsError(
            f"vLLM refuses {' '.join(engine_args)}: {lines[-1]}", next_step=f"Correct the {_PREFIX}* flag."
        ) from error


def known_options() -> frozenset[str]:
    """Every long option of the installed vLLM's server, with its dashes. Imports vLLM, which takes seconds."""
    return frozenset(
        option for action in _vllm_parser()._actions for option in action.option_strings if option.startswith("--")
    )


def unlisted_options(engine_args: Sequence[str]) -> list[str]:
    """Options that are not among those of the vLLM that the list was made with: misspelt, or of another version."""
    listed = _listed_options()
    names = [
        "--" + word[2:].partition("=")[0].partition(".")[0].replace("_", "-")
        for word in engine_args
        if word.startswith("--")
    ]
    return [name for name in names if name not in listed]


@functools.cache
def _listed_options() -> frozenset[str]:
    content = importlib.resources.files("vime.backends.vllm_utils").joinpath(VLLM_FLAGS_FILE).read_text()
    return frozenset(json.loads(content)["options"])


def engine_options() -> list[tuple[str, str]]:
    """Flag (with the prefix) and help of every option of the installed vLLM that a user may set, sorted."""
    options = [
        (option, action.help or "")
        for action in _vllm_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and option_name(option) not in OWNED_VLLM_OPTIONS
    ]
    return sorted((_PREFIX + option[2:], help) for option, help in options)


@functools.cache
def _vllm_parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    return parser
