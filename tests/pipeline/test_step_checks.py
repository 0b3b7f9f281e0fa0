"""--ci-test and the gradient norms of --ci-save-grad-norm."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.step_checks import CheckSettings, StepChecks, read_norms
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.errors import SettingsError, TrainerError
from vime.settings.parse import parse_settings

GOOD = {"ppo_kl": 0.0, "pg_clipfrac": 0.0, "kl_loss": 0.0, "train_rollout_logprob_abs_diff": 0.01, "grad_norm": 2.0}


def checks(*flags: str, rank: int = 0, starts_elsewhere: bool = False) -> StepChecks:
    return StepChecks(CheckSettings.of(parse_settings(flags), rank, starts_elsewhere=starts_elsewhere))


@pytest.mark.parametrize(
    ("metric", "value", "place"),
    [
        ("ppo_kl", -0.002, StepPlace(4, 0)),
        ("pg_clipfrac", 0.1, StepPlace(4, 0)),
        ("kl_loss", 0.002, StepPlace(0, 0)),
        ("train_rollout_logprob_abs_diff", 0.11, StepPlace(4, 3)),
    ],
)
def test_a_step_that_fails_a_check_ends_the_run_and_is_named(metric: str, value: float, place: StepPlace) -> None:
    tested = checks("--ci-test")
    tested.check("actor", place, GOOD)
    with pytest.raises(
        TrainerError, match=rf"--ci-test: rollout {place.rollout_id}, step {place.step_id} of the actor: {metric} is"
    ):
        tested.check("actor", place, {**GOOD, metric: value})
    checks().check("actor", place, {**GOOD, metric: value})


def test_later_steps_may_differ_from_the_old_policy_and_from_the_reference() -> None:
    tested = checks("--ci-test")
    tested.check("actor", StepPlace(0, 1), {**GOOD, "ppo_kl": 0.5, "pg_clipfrac": 0.5, "kl_loss": 0.5})
    tested.check("actor", StepPlace(1, 0), {**GOOD, "kl_loss": 0.5})


def test_kl_is_checked_only_where_it_starts_at_zero() -> None:
    apart, first = {**GOOD, "ppo_kl": 0.5, "kl_loss": 0.5}, StepPlace(0, 0)
    checks("--ci-test", "--ci-disable-kl-checker").check("actor", first, apart)
    checks("--ci-test", "--use-rollout-logprobs").check("actor", first, {**GOOD, "ppo_kl": 0.5})
    checks("--ci-test", starts_elsewhere=True).check("actor", first, {**GOOD, "kl_loss": 0.5})


def test_the_threshold_of_the_gap_is_the_users() -> None:
    wide = checks("--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", "0.5")
    wide.check("actor", StepPlace(0, 0), {**GOOD, "train_rollout_logprob_abs_diff": 0.4})


def test_norms_are_saved_by_the_first_rank_and_must_be_met_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "norms.jsonl"
    for rank in (0, 1):
        saving = checks("--ci-save-grad-norm", str(path), rank=rank)
        saving.check("critic", StepPlace(0, 0), {"critic_grad_norm": 7.0})
        saving.check("actor", StepPlace(0, 0), GOOD)
        saving.check("actor", StepPlace(0, 1), {**GOOD, "grad_norm": 3.0})
    assert len(path.read_text().splitlines()) == 3
    assert read_norms(path) == {("critic", 0, 0): 7.0, ("actor", 0, 0): 2.0, ("actor", 0, 1): 3.0}
    met = checks("--ci-load-grad-norm", str(path), rank=1)
    met.check("actor", StepPlace(0, 1), {**GOOD, "grad_norm": 3.02})
    with pytest.raises(TrainerError, match=r"step 1 of the actor: the gradient norm is 3.2, allowed: 3 within 1%"):
        met.check("actor", StepPlace(0, 1), {**GOOD, "grad_norm": 3.2})
    with pytest.raises(TrainerError, match=r"rollout 1, step 0 of the actor.*allowed: a step that the file has"):
        met.check("actor", StepPlace(1, 0), GOOD)


def test_a_file_without_norms_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    for name in ("other.jsonl", "absent.jsonl"):
        with pytest.raises(SettingsError, match=rf"--ci-load-grad-norm .*{name} can't be read"):
            checks("--ci-load-grad-norm", str(tmp_path / name))
