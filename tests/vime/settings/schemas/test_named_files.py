"""The structured files, as a start or a dry run checks them."""

from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.parse import parse_settings
from vime.settings.schemas.named_files import check_named_files, named_file_problems


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "m.yaml").write_text("megatron: [{role: actor, overrides: {lr: 1e-6, adam_beta1: 0.8, my_knob: 1}}]")
    (tmp_path / "v.yaml").write_text("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 1}]}]")
    (tmp_path / "e.yaml").write_text("eval: {datasets: [{name: a, path: b}]}")
    files = {"--megatron-config-path": "m.yaml", "--vllm-config": "v.yaml", "--eval-config": "e.yaml"}
    return [word for flag, name in files.items() for word in (flag, str(tmp_path / name))]


def test_an_unknown_override_is_a_warning(flags: list[str]) -> None:
    (warning,) = check_named_files(parse_settings(flags))
    assert "megatron[0].overrides.my_knob is no known argument" in warning
    assert named_file_problems(parse_settings(flags)) == [warning]


def test_a_start_stops_at_the_first_error_and_a_dry_run_names_those_of_all_files(
    flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "m.yaml").write_text("megatron: [{role: actor, overrides: {lr: fast}}]")
    (tmp_path / "e.yaml").write_text("eval: {datasets: []}")
    settings = parse_settings(flags)
    with pytest.raises(SettingsError, match=r"m\.yaml: megatron\[0\]\.overrides\.lr is 'fast', allowed: a number"):
        check_named_files(settings)
    assert len(named_file_problems(settings)) == 2


def test_nothing_is_read_when_no_file_is_named() -> None:
    assert check_named_files(parse_settings([])) == named_file_problems(parse_settings([])) == []


def test_a_file_that_is_missing_is_named_with_its_flag() -> None:
    with pytest.raises(SettingsError, match=r"--vllm-config nowhere\.yaml: .*No such file"):
        check_named_files(parse_settings(["--vllm-config", "nowhere.yaml"]))
