"""The command line of the documented flags, and its help."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

from vime.errors import SettingsError
from vime.settings.flag import Flag, Kind, flags_of
from vime.settings.groups import GROUPS, all_flags
from vime.settings.refusals import REFUSALS
from vime.settings.values import json_object

EPILOG = """\
examples:
  vime train --config run.toml --dry-run
  vime train --hf-checkpoint models/qwen3 --prompt-data prompts.jsonl --input-key prompt --label-key label \\
      --apply-chat-template --rm-type math --num-rollout 200 --rollout-batch-size 32 --n-samples-per-prompt 8 \\
      --rollout-max-response-len 1024 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --save runs/a --save-interval 20

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


def parse_words(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[SettingsError]]:
    """(field -> value, flags of others with their words, errors): what can't be parsed, and words of no flag."""
    parser = build_parser()
    starts = [place for place, word in enumerate(argv) if _is_flag(word)]
    values, rest, errors = dict[str, Any](), list[str](), _stray(argv[: starts[0]] if starts else argv)
    for start, end in itertools.pairwise([*starts, len(argv)]):
        try:
            namespace, left_over = parser.parse_known_args(list(argv[start:end]))
        except SettingsError as error:
            errors.append(error)
            continue
        if left_over and not _is_flag(left_over[0]):
            errors += _stray(left_over, f" after {argv[start]}, which takes no more")
        else:
            rest += left_over
        for field, value in vars(namespace).items():
            repeats = all_flags()[field][1].kind is Kind.REPEATED
            values[field] = [*values.get(field, []), *value] if repeats else value
    return values, rest, errors


def _is_flag(word: str) -> bool:
    """Text with blanks before any `=` is a value, as argparse has it: `-- a line --`."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def _stray(words: Sequence[str], where: str = "") -> list[SettingsError]:
    step = "Flags start with two dashes; a text with blanks needs quotes."
    return [SettingsError(f"Stray word {word!r}{where}.", next_step=step) for word in words]


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
