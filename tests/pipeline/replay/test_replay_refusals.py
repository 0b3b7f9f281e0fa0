"""What a replay refuses names what the user of `vime replay` gave, and what that command takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.replay.changes import changed_settings
from pipeline.replay.replay import refuse_no_model
from pipeline.replay.source import _check_commit
from vime.errors import CommitError, NoRunError, SettingsError
from vime.settings.resolve import resolve


@pytest.mark.parametrize("flag", ["--diff", "--settings"])
def test_a_missing_file_of_settings_is_told_with_the_flag_that_named_it(flag: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"^{flag} {tmp_path}/nope.toml: No such file or directory"):
        changed_settings(resolve([]).settings, flag, str(tmp_path / "nope.toml"))


def test_a_model_folder_that_is_none_is_the_runs_only_where_the_run_was_given_it(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(
        NoRunError, match=f"^The run's --hf-checkpoint {absent} is no folder here.*with --hf-checkpoint"
    ):
        refuse_no_model(absent, absent)
    with pytest.raises(NoRunError, match=f"^--hf-checkpoint {absent} is no folder. Give the folder of the run's"):
        refuse_no_model(absent, "models/a")
    with pytest.raises(NoRunError, match=f"^--hf-checkpoint {tmp_path} holds no config.json"):
        refuse_no_model(str(tmp_path), "models/a")
    (tmp_path / "config.json").touch()
    refuse_no_model(str(tmp_path), "models/a")


def test_a_damaged_commit_leads_to_rollouts_that_do_not_need_it(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "committed_3.json").write_text("{")
    with pytest.raises(CommitError, match=r"damaged.*choose rollout 3 or one before it") as raised:
        _check_commit(tmp_path, 3)
    assert "--ckpt-step" not in raised.value.next_step
