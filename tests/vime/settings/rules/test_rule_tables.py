"""Every rule is in its module's table, says why it is there, and agrees with the tables it mirrors."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from vime.rollout.hook_signatures import HOOKS
from vime.rollout.rewards.graders import BUILT_IN
from vime.settings import rules
from vime.settings.groups import all_flags
from vime.settings.parse import parse_settings
from vime.settings.rules import FILE_RULES, MACHINE_RULES, RULES
from vime.settings.rules.advice import advice
from vime.settings.rules.engine_capabilities import FACTS, facts_of
from vime.settings.rules.problem import Problem, problem, shown
from vime.settings.rules.rollout import REWARDS


def public_rules() -> Iterator[str]:
    """Names of functions in the modules of rules that yield problems about settings alone or with the machine."""
    for found in pkgutil.iter_modules(rules.__path__):
        module = importlib.import_module(f"vime.settings.rules.{found.name}")
        for name, function in inspect.getmembers(module, inspect.isgeneratorfunction):
            parameters = tuple(inspect.signature(function).parameters)
            is_rule = parameters in (("settings",), ("settings", "machine")) and not name.startswith("_")
            if is_rule and function.__module__ == module.__name__ and function is not advice:
                yield name


def test_every_rule_is_registered_once() -> None:
    registered = [rule.__name__ for rule in (*RULES, *FILE_RULES, *MACHINE_RULES)]
    assert sorted(registered) == sorted(public_rules())


@pytest.mark.parametrize("rule", [*RULES, *FILE_RULES, *MACHINE_RULES], ids=lambda rule: rule.__name__)
def test_a_rule_says_why_it_is_there(rule: object) -> None:
    assert len((inspect.getdoc(rule) or "").split()) >= 3


def test_documented_rewards_are_those_that_exist() -> None:
    assert set(REWARDS) == BUILT_IN


def test_every_hook_flag_has_a_signature() -> None:
    without_signature = {"extra_args_provider_path"}
    paths = {
        field
        for field, (_, described) in all_flags().items()
        if described.help.startswith("Import path") or field.endswith("_hook")
    }
    assert paths - without_signature == set(HOOKS)


@pytest.mark.parametrize(
    ("version", "since"),
    [
        ("0.25.1", (0, 26)),
        ("0.26.0", (0, 26)),
        ("0.31.9", (0, 26)),
        ("0.32.0+cpu", (0, 32)),
        ("1.0", (0, 32)),
        ("unknown", (0, 26)),
    ],
)
def test_a_version_between_two_measured_ones_has_the_facts_of_the_older(version: str, since: tuple[int, int]) -> None:
    assert facts_of(version).since == since
    assert [facts.since for facts in FACTS] == sorted(facts.since for facts in FACTS)


@pytest.mark.parametrize(
    ("words", "flags", "expected"),
    [
        ("--kl-coef 0.1", "--kl-coef", "--kl-coef is 0.1"),
        ("", "--ref-load", "--ref-load is left out"),
        ("--use-tis", "--use-tis", "--use-tis"),
        ("--kl-coef 0.1", "--kl-coef --ref-load", "--kl-coef 0.1 without --ref-load"),
        ("", "--ref-load --use-tis", "No --ref-load without --use-tis"),
        ("--disable-rewards-normalization", "--disable-rewards-normalization", "--disable-rewards-normalization"),
        ("", "--lr --disable-rewards-normalization", "--lr 1e-06 without --disable-rewards-normalization"),
        ("--no-offload-train", "--lr --offload-train", "--lr 1e-06 with --no-offload-train"),
        ("--rollout-stop a b", "--rollout-stop", "--rollout-stop is a b"),
        ("--wandb-key hush", "--wandb-key", "--wandb-key is ***"),
    ],
)
def test_what_was_found_is_shown_as_it_was_typed(words: str, flags: str, expected: str) -> None:
    assert shown(parse_settings(words.split()), flags) == expected


def test_a_problem_reads_as_one_or_two_sentences() -> None:
    found = problem(parse_settings(["--lr", "1"]), "--lr", allowed="less", reason="Too much.", next_step="Lower it.")
    assert found == Problem(("--lr",), "--lr is 1.0", "less", "Too much.", "Lower it.")
    assert str(found) == "--lr is 1.0, allowed: less. Too much."
