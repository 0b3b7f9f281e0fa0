"""`--vllm-*` flags: every option of vLLM's server, passed through under a prefix."""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
from collections.abc import Sequence

from vime.settings.owned_options import OWNED_VLLM_OPTIONS, option_name
from vime.settings.passed_on import nearest

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


def unknown_options(engine_args: Sequence[str]) -> dict[str, str]:
    """Options, prefix restored, that the installed vLLM doesn't know -> its nearest one, or "".

    vLLM is imported (some seconds) only for a name that is not among those of the vLLM that the list was made with: a
    misspelt one, or one of another version.
    """
    unlisted = [
        name for word in engine_args if word.startswith("--") and (name := _name(word)) not in _listed_options()
    ]
    if not unlisted:
        return {}
    known = known_options()
    near = {name: nearest(name, known) for name in unlisted if name not in known}
    return {_prefixed(name): meant and _prefixed(meant) for name, meant in near.items()}


def known_options() -> frozenset[str]:
    """Every long option of the installed vLLM's server, with its dashes. Imports vLLM, which takes seconds."""
    return frozenset(
        option for action in vllm_parser()._actions for option in action.option_strings if option.startswith("--")
    )


def _name(word: str) -> str:
    """`--speculative_config.method=x` -> `--speculative-config`."""
    return "--" + word[2:].partition("=")[0].partition(".")[0].replace("_", "-")


def _prefixed(option: str) -> str:
    return _PREFIX + option[2:]


@functools.cache
def _listed_options() -> frozenset[str]:
    content = importlib.resources.files("vime.backends.vllm_utils").joinpath(VLLM_FLAGS_FILE).read_text()
    return frozenset(json.loads(content)["options"])


def engine_options() -> list[tuple[str, str]]:
    """Flag (with the prefix) and help of every option of the installed vLLM that a user may set, sorted."""
    options = [
        (option, action.help or "")
        for action in vllm_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and option_name(option) not in OWNED_VLLM_OPTIONS
    ]
    return sorted((_prefixed(option), help) for option, help in options)


@functools.cache
def vllm_parser() -> argparse.ArgumentParser:
    """The parser of vLLM's server. Imports vLLM, which takes seconds."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    return parser
