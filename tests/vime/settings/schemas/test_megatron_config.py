"""`--megatron-config-path`."""

import logging
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.schemas.megatron_config import check_megatron_config, read_megatron_config, role_overrides

DOCUMENTED = """
megatron:
  - name: default
    role: actor
    overrides:
      lr: 1e-6
  - name: default
    role: critic
    overrides:
      lr: 1e-5
"""
EXISTING = {"lr": 1e-4, "train_iters": 10, "load": None, "bf16": False, "adam_beta1": 0.9}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "megatron.yaml"


def test_each_role_gets_its_own_values_as_numbers(file: Path) -> None:
    file.write_text(DOCUMENTED)
    assert role_overrides(str(file), "actor", EXISTING) == {"lr": 1e-6}
    assert role_overrides(str(file), "critic", EXISTING) == {"lr": 1e-5}
    assert check_megatron_config(str(file), EXISTING) == []


def test_text_becomes_the_type_of_the_existing_number_and_only_of_a_number(file: Path) -> None:
    values = '{lr: "3e-5", train-iters: "7", load: "5", bf16: "yes"}'
    file.write_text(f"megatron: [{{role: critic, args: {values}}}]")
    assert role_overrides(str(file), "critic", EXISTING) == {"lr": 3e-5, "train_iters": 7, "load": "5", "bf16": "yes"}
    assert role_overrides(str(file), "actor", EXISTING) == {}


def test_an_unknown_key_is_set_with_a_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("megatron: [{role: actor, overrides: {my_knob: 3}}]")
    with caplog.at_level(logging.WARNING):
        assert role_overrides(str(file), "actor", EXISTING) == {"my_knob": 3}
    assert "megatron[0].overrides.my_knob is no known argument; it is set for the actor all the same" in caplog.text


def test_node_counts_are_ignored_with_a_warning(file: Path) -> None:
    file.write_text("megatron: [{role: critic, num_nodes: 2, num_gpus_per_node: 8}]")
    assert [warning.partition(": ")[2] for warning in check_megatron_config(str(file), EXISTING)] == [
        "megatron[0].num_nodes is ignored: actor and critic share the nodes of --actor-num-nodes.",
        "megatron[0].num_gpus_per_node is ignored: actor and critic share the nodes of --actor-num-nodes.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatron: [{role: judge}]", r"megatron\[0\]\.role is 'judge', allowed: actor, critic"),
        ("megatron: [{role: actor}, {role: actor}]", r"megatron\[1\] is a second actor, the first is megatron\[0\]"),
        ("megatron: [{name: x}]", r"megatron\[0\] has no role, which it needs"),
        ("megatron: [{role: actor, overides: {}}]",
         r"megatron\[0\] has the unknown key overides, allowed: .*; the nearest one is overrides"),
        ("megatron: [{role: actor, overrides: {}, args: {}}]", "has overrides and args, allowed: one of them"),
        ("megatron: {role: actor}", r"megatron is \{'role': 'actor'\}, allowed: a list"),
        ("megaton: []", "the top level has the unknown key megaton, allowed: megatron; the nearest one is megatron"),
        ("megatron: [", "line 1, column 12: expected the node content"),
        ("megatron: [{role: actor, role: critic}]", "'role' is there twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_megatron_config(str(file))
    assert str(file) in caught.value.message
    assert caught.value.next_step


def test_a_number_that_is_none_is_named_with_its_place(file: Path) -> None:
    file.write_text("megatron: [{role: actor, overrides: {train_iters: '1.5'}}]")
    with pytest.raises(SettingsError, match=r"overrides\.train_iters is '1\.5', allowed: a whole number"):
        role_overrides(str(file), "actor", EXISTING)
