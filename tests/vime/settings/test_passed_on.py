"""Flags of others, and misspelt ones of vime."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripts import load_script
from vime.errors import SettingsError
from vime.settings.parse import parse_settings
from vime.settings.passed_on import (
    edit_distance,
    listed_megatron_flags,
    nearest_words,
    own_flag_names,
    share_out,
    unknown_flags,
)

ROOT = Path(__file__).resolve().parents[3]


def test_each_flag_goes_to_its_owner_with_its_values() -> None:
    words = "--vllm-x 1 --router-policy consistent_hash --tensor-model-parallel-size 2 --moe-layer-freq 0 1 --vllm-y"
    shared, errors = share_out(words.split())
    assert errors == []
    assert shared.vllm == ["--vllm-x", "1", "--vllm-y"]
    assert shared.router == ["--router-policy", "consistent_hash"]
    assert shared.megatron == ["--tensor-model-parallel-size", "2", "--moe-layer-freq", "0", "1"]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--kl-coeff", "--kl-coef"),
        ("--rollout-temp", "--rollout-temperature"),
        ("--vllm-server-concurency", "--vllm-server-concurrency"),
        ("--no-offload-trian", "--no-offload-train"),
        ("--num-rollouts=3", "--num-rollout"),
    ],
)
def test_a_misspelt_flag_of_vime_is_refused_with_the_nearest(misspelt: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"{misspelt.partition('=')[0]} is not a flag; the nearest one is {meant}"):
        parse_settings([misspelt, "3"] if "=" not in misspelt else [misspelt])


def test_no_flag_of_megatron_looks_misspelt() -> None:
    for flag in listed_megatron_flags() - own_flag_names():
        assert share_out([flag])[0].megatron == [flag]


def test_flags_that_no_megatron_knows_are_named_with_the_nearest() -> None:
    settings = parse_settings(["--tensor-model-parralel-size", "2", "--swiglu", "--my-own-plugin"])
    unknown = unknown_flags(settings, listed_megatron_flags())
    assert unknown["--tensor-model-parralel-size"] == "--tensor-model-parallel-size"
    assert unknown["--my-own-plugin"] == "", "nothing is similar"
    assert set(unknown) == {"--tensor-model-parralel-size", "--my-own-plugin"}
    assert unknown_flags(settings, listed_megatron_flags() | set(unknown)) == {}


def test_nothing_is_named_that_is_not_similar() -> None:
    assert nearest_words("--foo-bar-baz", own_flag_names()) == ""
    assert nearest_words("--epochs", own_flag_names()) == "; the nearest one is --num-epoch"
    assert nearest_words("--vx", ["--vllm-x"]) == ""


def test_edits_are_counted() -> None:
    assert edit_distance("kitten", "sitting", 9) == 3
    assert edit_distance("", "abc", 9) == 3
    assert edit_distance("same", "same", 9) == 0
    assert edit_distance("a", "abcdef", 2) > 2


@given(st.text("ab-", max_size=6), st.text("ab-", max_size=6), st.text("ab-", max_size=6))
def test_edit_distance_is_a_metric(first: str, second: str, third: str) -> None:
    assert edit_distance(first, second, 9) == edit_distance(second, first, 9)
    assert (edit_distance(first, second, 9) == 0) == (first == second)
    assert edit_distance(first, third, 9) <= edit_distance(first, second, 9) + edit_distance(second, third, 9)


@pytest.mark.slow
def test_the_listed_flags_are_those_of_the_installed_megatron() -> None:
    """Refreshed by `python scripts/list_megatron_flags.py`."""
    script = load_script("list_megatron_flags")
    assert json.loads(script.TARGET.read_text()) == json.loads(script.content())


@pytest.mark.slow
def test_no_option_of_the_installed_vllm_looks_misspelt() -> None:
    from vime.backends.vllm_utils.arguments import engine_options

    for name, _ in engine_options():
        if name not in own_flag_names():
            assert share_out([name])[0].vllm == [name]
