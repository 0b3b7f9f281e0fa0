"""Frozen parameters, optimizers that forget, a padded vocabulary, overrides by role, and hooks of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.stateless_adam import StatelessAdam

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

WORKER = "settings_worker.py"


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    scenarios = ["frozen_parameters", "forgetful_optimizers", "unsaved_optimizer", "padded_vocabulary"]
    scenarios += ["renamed_model", "role_overrides", "hooks"]
    return run_world(1, scenarios, WORKER)


@pytest.mark.parametrize("variant", ["only", "frozen", "recomputed", "distributed"])
def test_only_the_named_parameters_change_and_their_training_resumes(one_rank: dict[str, Any], variant: str) -> None:
    found = one_rank["frozen_parameters"][variant]
    assert found["moved"]
    assert all(name.startswith("model.layers.1.") or name == "model.norm.weight" for name in found["moved"])
    assert "model.layers.1.input_layernorm.weight" in found["moved"]
    assert (found["resumed"], found["weights"]) == (0.0, 0.0)


def test_frozen_layers_below_a_recomputed_one_change_no_gradient(one_rank: dict[str, Any]) -> None:
    found = one_rank["frozen_parameters"]
    assert found["recomputed"]["grad_norm"] == pytest.approx(found["only"]["grad_norm"], rel=1e-6)
    assert found["only"]["grad_norm"] > 0.01


def test_a_value_head_is_always_trained(one_rank: dict[str, Any]) -> None:
    moved = one_rank["frozen_parameters"]["critic"]
    assert {"head.weight", "head.bias"} <= set(moved)
    assert all(name.startswith(("head.", "model.layers.1.")) for name in moved)


def test_an_expression_that_matches_nothing_is_refused_with_names_that_exist(one_rank: dict[str, Any]) -> None:
    said = one_rank["frozen_parameters"]["unmatched"]
    assert said.startswith(
        r"SettingsError: --freeze-params-name-list layers\.7\. matches no parameter, allowed: a part"
    )
    assert "decoder." in said


def test_a_list_that_leaves_nothing_to_train_is_refused(one_rank: dict[str, Any]) -> None:
    assert "--freeze-params-name-list leaves no parameter to train" in one_rank["frozen_parameters"]["nothing_left"]


@pytest.mark.slow
def test_a_pipeline_stage_without_trained_parameters_trains_and_resumes(run_world: Any) -> None:
    found = run_world(2, ["frozen_stage"], WORKER)["frozen_stage"]
    assert found["moved"]
    assert not any("layers.0" in name or "embed" in name for name in found["moved"])
    assert found["metrics"] < 3e-5
    assert found["weights"] < 1e-5
    assert found["resumed"] == 0.0


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_stateless_adam_trains_like_adam_that_is_cleared_after_each_step(
    one_rank: dict[str, Any], optimizer: str
) -> None:
    found = one_rank["forgetful_optimizers"][optimizer]
    assert found["kept"] == 0
    assert found["apart"] < 1e-6
    assert found["ordinary"] > 1e-4, "Adam with its moments trains otherwise"
    assert (found["resumed"], found["again"]) == (0.0, 0.0)
    assert found["bytes"] < 0.5, "there are no moments to save"


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_a_checkpoint_without_the_optimizer_resumes_with_the_same_weights_and_a_new_one(
    one_rank: dict[str, Any], optimizer: str
) -> None:
    found = one_rank["unsaved_optimizer"][optimizer]
    assert found["bytes"] < 0.5
    assert found["resumed"] == 0.0
    assert found["step"] == 0.0, "the schedule is at its place, and the gradients are those of the same weights"
    assert found["kept"] == 0.0, "an optimizer that is there is gone on with"
    assert found["apart"] > 1e-4, "without its moments it takes another step"
    assert "RestoreError" in found["said"], "who wants the optimizer is not given a new one"


def test_a_named_family_takes_the_place_of_the_configs_own_type(one_rank: dict[str, Any]) -> None:
    found = one_rank["renamed_model"]
    assert (found["metrics"], found["weights"]) == (0.0, 0.0)
    assert "model_type is 'house_model', allowed: qwen2" in found["said"]


@pytest.mark.parametrize("decoupled", [True, False])
def test_each_stateless_step_is_the_first_step_of_a_new_adam(decoupled: bool) -> None:
    options = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.3}
    generator = torch.Generator().manual_seed(0)
    mine = torch.randn(50, generator=generator).requires_grad_()
    other = mine.detach().clone().requires_grad_()
    optimizer = StatelessAdam([{"params": [mine], **options}], decoupled=decoupled)
    for _ in range(3):
        mine.grad = torch.randn(50, generator=generator)
        other.grad = mine.grad.clone()
        optimizer.step()
        (torch.optim.AdamW if decoupled else torch.optim.Adam)([other], **options).step()
    assert torch.allclose(mine, other, atol=1e-6)
    assert not optimizer.state


def test_rows_of_a_padded_vocabulary_change_nothing(one_rank: dict[str, Any]) -> None:
    found = one_rank["padded_vocabulary"]
    assert found["rows"] == 64
    assert found["metrics"] < 1e-6
    assert found["weights"] < 1e-6
    assert found["said"].startswith("SettingsError: --padded-vocab-size is 49, allowed: a multiple of 1")


def test_overrides_of_a_role_win_over_flags(one_rank: dict[str, Any]) -> None:
    found = one_rank["role_overrides"]
    assert (found["lr"], found["weight_decay"]) == (2e-3, 0.25)
    assert found["said"].startswith("SettingsError: --megatron-config-path: min_lr is 'low', allowed: a number")


def test_hooks_are_called_in_order_with_the_documented_arguments(one_rank: dict[str, Any]) -> None:
    found = one_rank["hooks"]
    assert found["called"] == [
        ["init", 128],
        ["provide", True, True, None],
        ["log_prob", 1, ""],
        ["step", 50, 5, 0, 0.0, True],
        ["step", 50, 5, 1, 0.0, True],
    ]
    assert found["metrics"] < 1e-6


def test_an_error_in_a_hook_names_the_hook_and_no_weight_changes(one_rank: dict[str, Any]) -> None:
    found = one_rank["hooks"]
    assert found["said"].startswith(
        "TrainerError: --custom-megatron-before-train-step-hook-path own.step raised KeyError: 'knob'"
    )
    assert found["kept"] == 0.0


def test_the_critic_is_the_users_model_with_a_value_head(one_rank: dict[str, Any]) -> None:
    called = one_rank["hooks"]["both"]
    assert [call[0] for call in called] == ["init", "provide", "provide", "log_prob", "step", "step"]
