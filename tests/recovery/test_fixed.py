"""A run's queue goes on only with the data and the group size that it was built from."""

from pathlib import Path

import msgspec
import pytest

from recovery.fixed import FixedSettings, fixed_path, hold_to_fixed
from vime.errors import RestoreError

SETTINGS = FixedSettings("rollout", "abc", 8, False, 42)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollout").mkdir()
    hold_to_fixed(tmp_path, SETTINGS)
    return tmp_path


def test_the_same_settings_go_on(run: Path) -> None:
    hold_to_fixed(run, SETTINGS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_samples_per_prompt": 4}, "--n-samples-per-prompt is 4, was 8"),
        ({"rollout_seed": 1}, "--rollout-seed is 1, was 42"),
        ({"rollout_shuffle": True}, "--rollout-shuffle is True, was False"),
        ({"run_id": "other"}, "--rollout-queue-run-id is other, was rollout"),
        ({"transport": "object-store"}, "--rollout-data-transport is object-store, was straw"),
        ({"dataset_digest": "xyz"}, r"--prompt-data and its keys give other prompts \(digest xyz, was abc\)"),
    ],
)
def test_a_changed_setting_is_refused_with_both_values(run: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(RestoreError, match=words) as caught:
        hold_to_fixed(run, msgspec.structs.replace(SETTINGS, **change))
    assert "another --save" in caught.value.next_step


def test_a_record_from_before_there_were_transports_is_one_of_straw(run: Path) -> None:
    path = fixed_path(run)
    old = msgspec.json.decode(path.read_bytes())
    del old["transport"]
    path.write_bytes(msgspec.json.encode(old))
    hold_to_fixed(run, SETTINGS)


def test_a_damaged_record_is_refused_by_name(run: Path) -> None:
    fixed_path(run).write_text("{")
    with pytest.raises(RestoreError, match=r"fixed\.json: damaged"):
        hold_to_fixed(run, SETTINGS)
