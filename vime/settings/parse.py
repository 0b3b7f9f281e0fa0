"""From a command line to `Settings`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from vime.errors import SettingsError
from vime.settings.flag import Flag, flags_of
from vime.settings.groups import GROUPS, Settings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message[0].upper()}{message[1:]}.", next_step="`vime train --help` lists every flag.")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the documented flags; Megatron's and vLLM's own are left to `parse_settings`."""
    parser = _Parser(
        prog="vime train",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a language model by reinforcement learning, as one asynchronous stream.",
        epilog=(
            "Flags that start with --vllm- go to the inference engine without that prefix "
            "(--vllm-max-model-len becomes --max-model-len).\n"
            "Every other flag is Megatron's (--tensor-model-parallel-size, --lr-warmup-iters, ...)."
        ),
    )
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title, (group.__doc__ or "").strip())
        for described in flags_of(group):
            _add(section, described)
    return parser


def _add(section: argparse._ArgumentGroup, described: Flag) -> None:
    if described.is_switch:
        action = "store_false" if described.inverted else "store_true"
        section.add_argument(described.name, dest=described.field, action=action, help=described.help)
        return
    shown = "" if described.default is None else f" Default: {described.default}."
    section.add_argument(
        described.name,
        dest=described.field,
        type=described.type,
        default=described.default,
        choices=described.choices,
        metavar=described.type.__name__.upper() if described.choices is None else None,
        help=(described.help + shown).replace("%", "%%"),
    )


def parse_settings(argv: Sequence[str]) -> Settings:
    """Parse and check the flags one by one.

    Raises:
        SettingsError: an unknown choice, a value of the wrong type or out of range, or a stray word.
    """
    values, rest = build_parser().parse_known_args(list(argv))
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        described_flags = flags_of(group)
        for described in described_flags:
            _check_range(described, getattr(values, described.field))
        groups[name] = group(**{described.field: getattr(values, described.field) for described in described_flags})
    vllm_args, megatron_args = _split_passed_on(rest)
    return Settings(**groups, vllm_args=tuple(vllm_args), megatron_args=tuple(megatron_args))


def _check_range(described: Flag, value: Any) -> None:
    if value is None or described.check is None:
        return
    allowed = described.check(value)
    if allowed is not None:
        raise SettingsError(f"{described.name} is {value}, allowed: {allowed}.", next_step="Correct the flag.")


def _split_passed_on(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Share out flags that aren't ours, each with the values that follow it."""
    vllm: list[str] = []
    megatron: list[str] = []
    target: list[str] | None = None
    for word in rest:
        if word.startswith("--vllm-"):
            target = vllm
        elif word.startswith("--router-"):
            raise SettingsError(f"{word}: the router is not part of this version.", next_step="Leave the flag out.")
        elif word.startswith("--"):
            target = megatron
        if target is None:
            raise SettingsError(f"Stray word {word!r} on the command line.", next_step="Flags start with two dashes.")
        target.append(word)
    return vllm, megatron


def settings_record(settings: Settings) -> bytes:
    """Resolved settings as readable JSON, for the run folder."""
    return json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True).encode()


class HookArgs:
    """Read-only flat view of the settings, for user hooks: `args.hf_checkpoint`, `args.rollout_temperature`, ..."""

    def __init__(self, settings: Settings) -> None:
        flat: dict[str, Any] = {}
        for name in GROUPS:
            flat.update(dataclasses.asdict(getattr(settings, name)))
        object.__setattr__(self, "_values", flat)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"args has no {name!r}; it holds the documented flags of vime") from None

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} can't be set from a hook")
