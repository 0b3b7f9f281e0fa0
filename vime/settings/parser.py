"""The command line of the documented flags, and its help."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from vime.errors import SettingsError
from vime.settings.flag import Flag, Kind, flags_of
from vime.settings.groups import GROUPS
from vime.settings.refusals import REFUSALS
from vime.settings.values import json_object

EPILOG = """\
Flags that start with --vllm- and aren't listed here go to the inference engine without that prefix
(--vllm-max-model-len becomes --max-model-len), flags that start with --router- to the router.
Every other flag is Megatron's (--tensor-model-parallel-size, --lr-warmup-iters, ...).
† is not built yet, or not for all values, and refused at the start; "Not built yet" in docs/flags.md says what works.
More: --help-vllm, --help-megatron, docs/flags.md.
"""

_UNFINISHED = frozenset(row.flag for row in REFUSALS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message[0].upper()}{message[1:]}.", next_step="`vime train --help` lists every flag.")


def build_parser(*, common_first: bool = False) -> argparse.ArgumentParser:
    """Parser of the documented flags; its namespace holds only the fields whose flags were given.

    With `common_first` the flags used most come in a section of their own, for the help.
    """
    parser = _Parser(
        prog="vime train",
        usage="vime train FLAG ...",
        allow_abbrev=False,
        add_help=common_first,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a language model by reinforcement learning, as one asynchronous stream.",
        epilog=EPILOG,
    )
    if common_first:
        section = parser.add_argument_group("most used")
        for group in GROUPS.values():
            for described in flags_of(group):
                if described.common:
                    _add(section, described)
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title, (group.__doc__ or "").strip())
        for described in flags_of(group):
            if not (common_first and described.common):
                _add(section, described)
    return parser


def _add(section: argparse._ArgumentGroup, described: Flag) -> None:
    options: dict[str, Any] = {"dest": described.field, "help": help_text(described).replace("%", "%%")}
    if described.kind is Kind.SWITCH:
        options["action"] = "store_false" if described.inverted else "store_true"
        options["default"] = argparse.SUPPRESS
    elif described.kind is Kind.OPTIONAL_SWITCH:
        options["action"] = argparse.BooleanOptionalAction
    elif described.kind is Kind.JSON:
        options.update(type=_json_argument, metavar="JSON")
    else:
        options.update(type=described.type, choices=described.choices)
        if described.choices is None:
            options["metavar"] = described.type.__name__.upper()
        if described.kind is Kind.LIST:
            options["nargs"] = "+"
        elif described.kind is Kind.REPEATED:
            options["action"] = "append"
    section.add_argument(described.name, *described.aliases, **options)


def help_text(described: Flag) -> str:
    """The flag's sentence and its default; a dagger before it when the flag is not built, or not for all values."""
    mark = "† " if described.name in _UNFINISHED else ""
    shown = described.kind in (Kind.VALUE, Kind.JSON) and described.default is not None
    return f"{mark}{described.help}{f' Default: {described.default}.' if shown else ''}"


def _json_argument(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object ({error})") from error
