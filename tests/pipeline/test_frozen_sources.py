"""Frozen models are found, and compared with their digests, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.frozen_sources import check_sources, reference_source, teacher_source
from pipeline.trainer_wiring import trainer_config
from recovery.commit import QueueState
from tests.recovery.commits import commit
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import CommitError, RestoreError, SettingsError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a commit of rollout 4."""
    commit(tmp_path, 4, QueueState(trained=[(0, 3)], next_group_index=4, identity={}))
    return tmp_path


def settings(words: str, folder: Path) -> Settings:
    return parse_settings(words.replace("$DIR", str(folder)).split())


def test_sources_come_from_their_own_flags(run: Path) -> None:
    given = settings(
        "--ref-load $DIR --ref-ckpt-step 4 --use-opd --opd-type megatron --opd-teacher-load $DIR/teacher", run
    )
    assert reference_source(given) == WeightSource("--ref-load", run, 4)
    assert teacher_source(given) == WeightSource("--opd-teacher-load", run / "teacher", None)
    assert reference_source(settings("", run)) is None
    assert teacher_source(settings("--opd-teacher-load $DIR", run)) is None


def test_they_reach_every_rank_with_what_goes_with_them(run: Path) -> None:
    given = settings(
        "--hf-checkpoint $DIR --ref-load $DIR --ref-update-interval 3 --log-probs-max-tokens-per-gpu 50 "
        "--context-parallel-size 2 --rollout-batch-size 2", run
    )  # fmt: skip
    config = trainer_config(given, 2)
    assert config.reference == WeightSource("--ref-load", run)
    assert (config.teacher, config.reference_update_interval, config.log_probs_max_tokens) == (None, 3, 100)


@pytest.mark.parametrize("flag", ["--ref-load", "--use-opd --opd-type megatron --opd-teacher-load"])
def test_a_damaged_commit_is_refused_before_anything_is_loaded(run: Path, flag: str) -> None:
    check_sources(settings(f"{flag} $DIR", run))
    (run / "iter_0000004" / "model.distcp").write_bytes(bytes(200))
    with pytest.raises(CommitError, match=r"model.distcp: SHA-256 is"):
        check_sources(settings(f"{flag} $DIR", run))


def test_checkpoints_of_others_have_no_digests(run: Path) -> None:
    (run / "iter_0000009").mkdir()
    check_sources(settings("--ref-load $DIR --ref-ckpt-step 9", run))


def test_what_is_not_there_is_refused_before_anything_is_loaded(run: Path) -> None:
    with pytest.raises(RestoreError, match=r"--ref-load: .*iter_0000005 doesn't exist, found: iter_0000004"):
        check_sources(settings("--ref-load $DIR --ref-ckpt-step 5", run))
    (run / "model.safetensors").touch()
    with pytest.raises(SettingsError, match="is a Hugging Face folder"):
        check_sources(settings("--ref-load $DIR --ref-ckpt-step 4", run))
