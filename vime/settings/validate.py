"""Checks between flags: what can't work is refused in the first second, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable

from vime.errors import SettingsError, joined
from vime.settings.groups import Settings
from vime.settings.machine import Machine
from vime.settings.refusals import refused
from vime.settings.resolve import SETTINGS
from vime.settings.rules import FILE_RULES, MACHINE_RULES, RULES
from vime.settings.rules.advice import advice
from vime.settings.rules.named_files import named_file_warnings
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

    `more` are problems that others found and that belong into the same list (hooks, flags that are passed on).

    Returns warnings: what works, but hardly as meant (`vime.settings.rules.advice`), what may surprise in the files
    that settings name and, in a dry run, what a real start would refuse because it isn't built yet
    (`vime.settings.refusals`).

    Raises:
        SettingsError: one or more things that can't work, each with flags, value, what is allowed and a next step;
            unless `dry_run`, also settings that aren't built yet.
    """
    errors = refusals_of(settings, dry_run=dry_run, machine=machine, more=more)
    if errors:
        raise joined(errors, SETTINGS)
    return [*advice(settings), *named_file_warnings(settings), *(refused(settings) if dry_run else [])]


def refusals_of(
    settings: Settings, *, dry_run: bool, machine: Machine = _UNKNOWN_MACHINE, more: Iterable[Problem] = ()
) -> list[SettingsError]:
    """What `validate` refuses, one by one."""
    errors = [error_of(problem) for problem in (*find_problems(settings, machine), *more)]
    unbuilt = [] if dry_run else refused(settings)
    return errors + [SettingsError(words, next_step="Change or leave out the flag.") for words in unbuilt]


def file_refusals(settings: Settings) -> list[SettingsError]:
    """What is wrong with the files that single settings name, though others of the settings are wrong too."""
    return [error_of(problem) for rule in FILE_RULES for problem in rule(settings)]


def error_of(problem: Problem) -> SettingsError:
    """The problem as an error to raise."""
    return SettingsError(str(problem), next_step=problem.next_step)


def find_problems(settings: Settings, machine: Machine = _UNKNOWN_MACHINE) -> list[Problem]:
    """Everything that no version of vime could honour, in the order of the rules."""
    found = [problem for rule in (*RULES, *FILE_RULES) for problem in rule(settings)]
    return found + [problem for rule in MACHINE_RULES for problem in rule(settings, machine)]
