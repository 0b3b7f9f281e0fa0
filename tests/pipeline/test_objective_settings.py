"""From flags to the trainer's objective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.objective import objective_config
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.kl import KlKind
from vime.algorithms.objective_config import Estimator, LossKind, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.errors import SettingsError
from vime.settings.parse import parse_settings

LOSS = "vime.backends.megatron_utils.loss"


def config(words: str = "") -> ObjectiveConfig:
    return objective_config(parse_settings(words.split()))


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "objective_hooks.py").write_text("def weigh(): ...\ndef reduce(): ...\ndef advantages(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import objective_hooks  # type: ignore[import-not-found]

    yield objective_hooks
    del sys.modules["objective_hooks"]


def test_flags_reach_the_objective() -> None:
    found = config(
        "--advantage-estimator gspo --eps-clip 0.01 --eps-clip-high 0.02 --eps-clip-c 3 --calculate-per-token-loss "
        "--use-rollout-logprobs --entropy-coef 0.1 --use-opsm --opsm-delta 0.3 --normalize-advantages --gamma 0.9 "
        "--use-opd --opd-kl-coef 0.7"
    )
    assert found.estimator is Estimator.GSPO
    assert found.policy == PolicyLossSettings(PolicyObjective.PPO, 0.01, 0.02, 3.0)
    assert (found.calculate_per_token_loss, found.use_rollout_logprobs, found.normalize_advantages) == (True,) * 3
    assert (found.entropy_coef, found.opsm_delta, found.gamma, found.opd_kl_coef) == (0.1, 0.3, 0.9, 0.7)
    assert config("--opd-kl-coef 0.7").opd_kl_coef is None
    assert found.hook_args.eps_clip == 0.01


@pytest.mark.parametrize(
    ("words", "objective"),
    [
        ("", PolicyObjective.PPO),
        ("--advantage-estimator cispo", PolicyObjective.CISPO),
        ("--pg-loss-type reinforce", PolicyObjective.REINFORCE),
        ("--use-score-centering", PolicyObjective.REINFORCE),
        ("--advantage-estimator reinforce_plus_plus", PolicyObjective.PPO),
    ],
)
def test_the_objective_follows_from_estimator_and_score_centering(words: str, objective: PolicyObjective) -> None:
    assert config(words).policy.objective is objective


@pytest.mark.parametrize(
    ("words", "rule", "metrics_only"),
    [
        ("", WeightRule(), False),
        ("--use-tis", WeightRule(WeightKind.TIS, 0.0, 2.0), False),
        ("--use-tis --tis-clip-low 0.5 --tis-clip 3", WeightRule(WeightKind.TIS, 0.5, 3.0), False),
        (f"--use-tis --custom-tis-function-path {LOSS}.vanilla_tis_function", WeightRule(WeightKind.TIS), False),
        (f"--use-tis --custom-tis-function-path {LOSS}.icepop_function", WeightRule(WeightKind.ICEPOP), False),
        (
            f"--get-mismatch-metrics --custom-tis-function-path {LOSS}.icepop_function",
            WeightRule(WeightKind.ICEPOP),
            True,
        ),
        (
            f"--use-tis --get-mismatch-metrics --custom-tis-function-path {LOSS}.icepop_function",
            WeightRule(WeightKind.ICEPOP),
            False,
        ),
    ],
)
def test_built_in_weights_become_rules(words: str, rule: WeightRule, metrics_only: bool) -> None:
    found = config(words)
    assert (found.weight_rule, found.weighting, found.mismatch_metrics_only) == (rule, None, metrics_only)


def test_the_users_functions_are_loaded(hooks: Any) -> None:
    found = config(
        "--use-tis --custom-tis-function-path objective_hooks.weigh --custom-pg-loss-reducer-function-path "
        "objective_hooks.reduce --custom-advantage-function-path objective_hooks.advantages"
    )
    assert (found.weighting, found.reducer) == (hooks.weigh, hooks.reduce)
    assert found.custom_advantages is hooks.advantages
    assert found.weight_rule.kind is WeightKind.NONE


@pytest.mark.usefixtures("hooks")
def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="objective_hooks has no 'nope'") as caught:
        config("--custom-pg-loss-reducer-function-path objective_hooks.nope")
    assert caught.value.next_step == "Correct the path."


@pytest.mark.usefixtures("hooks")
def test_kinds_of_loss_and_what_goes_with_them_reach_the_objective(hooks: Any) -> None:
    found = config("--loss-type custom_loss --custom-loss-function-path objective_hooks.weigh --use-rollout-entropy "
                   "--recompute-loss-function --disable-compute-advantages-and-returns")  # fmt: skip
    assert (found.loss_kind, found.custom_loss) == (LossKind.CUSTOM, hooks.weigh)
    assert (found.scores_entropy, found.recomputes_loss, found.computes_advantages) == (True, True, False)
    plain = config()
    assert (plain.loss_kind, plain.custom_loss) == (LossKind.POLICY, None)
    assert (plain.scores_entropy, plain.recomputes_loss, plain.computes_advantages) == (False, False, True)
    assert config("--loss-type sft_loss").loss_kind is LossKind.SUPERVISED


def test_the_reference_reaches_the_objective() -> None:
    found = config("--use-kl-loss --kl-loss-coef 0.2 --kl-loss-type k2 --use-unbiased-kl --kl-coef 0.1")
    assert (found.use_kl_loss, found.kl_loss_coef, found.kl_coef) == (True, 0.2, 0.1)
    assert (found.kl_kind, found.use_unbiased_kl, found.needs_reference) == (KlKind.K2, True, True)


@pytest.mark.parametrize(
    ("words", "centers", "divides"),
    [
        ("", True, True),
        ("--advantage-estimator gspo", True, True),
        ("--disable-grpo-std-normalization", True, False),
        ("--disable-rewards-normalization", False, True),
        ("--advantage-estimator reinforce_plus_plus_baseline", True, False),
        ("--advantage-estimator reinforce_plus_plus", False, False),
        ("--advantage-estimator ppo", False, False),
        ("--loss-type sft_loss", False, True),
    ],
)
def test_rewards_are_centred_and_scaled_as_the_estimator_asks(words: str, centers: bool, divides: bool) -> None:
    objective = parse_settings(words.split()).objective
    assert (objective.centers_rewards, objective.divides_by_std) == (centers, divides)
