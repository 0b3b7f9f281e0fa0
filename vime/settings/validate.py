"""Checks between flags: what can't work is refused in the first second, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable

from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.machine import Machine
from vime.settings.refusals import refused
from vime.settings.rules import FILE_RULES, MACHINE_RULES, RULES
from vime.settings.rules.advice import advice
from vime.settings.rules.problem import Problem

_UNKNOWN_MACHINE = Machine()


def validate(
    settings: Settings,
    *,
    dry_run: bool = False,
    machine: Machine = _UNKNOWN_MACHINE,
    more: Iterable[Problem] = (),
) -> list[str]:
    """Check the settings against each other, the machine, and what is built. Reads small local files only.

    `more` are problems that others found and that belong into the same list (hooks, unknown flags of Megatron).

    Returns warnings: what works, but hardly as meant (`vime.settings.rules.advice`), and in a dry run what a real
    start would refuse because it isn't built yet (`vime.settings.refusals`).

    Raises:
        SettingsError: one or more things that can't work, each with flags, value, what is allowed and a next step;
            unless `dry_run`, also settings that aren't built yet.
    """
    problems = [*find_problems(settings, machine), *more]
    unbuilt = refused(settings)
    refusals = [] if dry_run else unbuilt
    if problems or refusals:
        raise _refusal(problems, refusals)
    return [*advice(settings), *(unbuilt if dry_run else [])]


def find_problems(settings: Settings, machine: Machine = _UNKNOWN_MACHINE) -> list[Problem]:
    """Everything that no version of vime could honour, in the order of the rules."""
    found = [problem for rule in (*RULES, *FILE_RULES) for problem in rule(settings)]
    return found + [problem for rule in MACHINE_RULES for problem in rule(settings, machine)]


def _refusal(problems: list[Problem], unbuilt: list[str]) -> SettingsError:
    entries = [(str(problem), problem.next_step) for problem in problems]
    entries += [(sentence, "Change or leave out the flag.") for sentence in unbuilt]
    if len(entries) == 1:
        return SettingsError(entries[0][0], next_step=entries[0][1])
    lines = [f"{number}. {text} Next: {step}" for number, (text, step) in enumerate(entries, start=1)]
    return SettingsError(
        "\n".join([f"{len(entries)} settings can't work:", *lines]), next_step="Correct these and start again."
    )
