"""The user's own weighting and reduction: how they are called, and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.reference.dense_objective import Options
from tests.reference.ragged_batches import random_step, totals
from tests.reference.run_step import product
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.objective_config import ObjectiveConfig
from vime.errors import SettingsError, TrainerError

ARGS = SimpleNamespace(name="args")


def keep_all(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    return given["pg_loss"], given["loss_masks"], {}


def test_weighting_gets_the_documented_keywords_sequence_by_sequence() -> None:
    seen: dict[str, Any] = {}

    def look(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        seen.update(given)
        return keep_all(**given)

    step = random_step(5)
    product(step, [list(range(len(step)))], Options(), weighting=look, hook_args=ARGS)
    lengths = [item.length for item in step]
    assert sorted(seen) == [
        *("args", "loss_masks", "pg_loss", "response_lengths"),
        *("rollout_log_probs", "total_lengths", "train_log_probs"),
    ]
    assert seen["args"] is ARGS
    assert seen["pg_loss"].shape == (sum(lengths),)
    assert seen["response_lengths"] == lengths
    assert seen["total_lengths"] == [item.prompt_length + item.length for item in step]
    for name in ("loss_masks", "train_log_probs", "rollout_log_probs"):
        assert [len(part) for part in seen[name]] == lengths
    assert [mask.tolist() for mask in seen["loss_masks"]] == [item.mask for item in step]
    old = [value * kept for value, kept in zip(step[0].old, step[0].mask, strict=True)]
    assert seen["train_log_probs"][0].tolist() == pytest.approx(old), "ppo weighs the stored policy"


def test_reinforce_weighs_the_current_policy() -> None:
    seen: dict[str, Any] = {}

    def look(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        seen.update(given)
        return keep_all(**given)

    step = random_step(5)
    product(step, [list(range(len(step)))], Options(objective="reinforce"), weighting=look)
    current = [value * kept for value, kept in zip(step[0].log_probs, step[0].mask, strict=True)]
    assert seen["train_log_probs"][0].tolist() == pytest.approx(current)
    assert not seen["train_log_probs"][0].requires_grad


def drop_first_tokens(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Drops the first token of each sequence, and reports which."""
    masks = [mask.clone() for mask in given["loss_masks"]]
    for mask in masks:
        mask[0] = 0
    dropped = torch.cat(given["loss_masks"]) - torch.cat(masks)
    return given["pg_loss"] * 2.0, masks, {"dropped": dropped}


def test_a_changed_mask_drops_tokens_but_keeps_the_denominators_and_reports_over_the_old_mask() -> None:
    step = random_step(11)
    for item in step:
        item.mask[0] = 1
    plain, plain_gradients = product(step, [list(range(len(step)))], Options())
    found, gradients = product(step, [list(range(len(step)))], Options(), weighting=drop_first_tokens)
    first = torch.cat([torch.arange(item.length) == 0 for item in step])
    assert torch.equal(gradients["log_probs"], (2.0 * plain_gradients["log_probs"]).masked_fill(first, 0.0))
    rollouts = {item.rollout: sum(sum(o.mask) for o in step if o.rollout == item.rollout) for item in step}
    share = sum(1 / rollouts[item.rollout] for item in step) / totals(step).num_rollouts
    assert found["dropped"] == pytest.approx(share)
    assert found["ois"] == plain["ois"]


@pytest.mark.parametrize("unmask", [False, True])
def test_a_mask_can_only_drop_tokens_never_train_masked_ones(unmask: bool) -> None:
    def add_one(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        masks = [torch.ones_like(mask) if unmask else mask for mask in given["loss_masks"]]
        return given["pg_loss"] + 1.0, masks, {}

    step = random_step(5)
    plain, _ = product(step, [list(range(len(step)))], Options(per_token=True))
    found, _ = product(step, [list(range(len(step)))], Options(per_token=True), weighting=add_one)
    share = sum(sum(item.mask) for item in step) / totals(step).num_trained_tokens
    assert found["pg_loss"] == pytest.approx(plain["pg_loss"] + share)


@pytest.mark.parametrize("wrong", ["pg_loss", "masks", "metric"])
def test_a_result_of_another_shape_is_refused_by_name(wrong: str) -> None:
    def broken(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        loss, masks = given["pg_loss"], given["loss_masks"]
        return (
            loss[:-1] if wrong == "pg_loss" else loss,
            masks[:-1] if wrong == "masks" else masks,
            {"metric": loss.mean() if wrong == "metric" else loss},
        )

    with pytest.raises(TrainerError, match=f"returned {wrong} of shape .* one value for each response token"):
        product(random_step(5), [[0, 1]], Options(), weighting=broken)


def test_two_weightings_at_once_are_refused() -> None:
    with pytest.raises(SettingsError, match="both given, allowed: one of them"):
        ObjectiveConfig(weighting=keep_all, weight_rule=WeightRule(WeightKind.TIS))


@pytest.mark.parametrize("per_token", [False, True])
def test_a_custom_reducer_replaces_the_reduction_of_the_policy_loss_alone(per_token: bool) -> None:
    seen: list[Any] = []

    def factory(*given: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        seen.append(given)
        mask = torch.cat(given[2])
        return lambda values: 3.0 * (values * mask).sum()

    step = random_step(5)
    options = Options(entropy_coef=0.5, per_token=per_token)
    plain, _ = product(step, [list(range(len(step)))], options)
    found, gradients = product(step, [list(range(len(step)))], options, reducer=factory)
    ((total_lengths, response_lengths, masks, asked_per_token),) = seen
    assert response_lengths == [item.length for item in step]
    assert total_lengths == [item.prompt_length + item.length for item in step]
    assert [mask.tolist() for mask in masks] == [item.mask for item in step]
    assert asked_per_token is per_token
    assert found["entropy_loss"] == plain["entropy_loss"]
    denominator = totals(step).num_trained_tokens if per_token else totals(step).num_rollouts
    _, sums = product(step, [list(range(len(step)))], Options(per_token=True))
    expected = sums["log_probs"] * totals(step).num_trained_tokens * 3.0 / denominator
    torch.testing.assert_close(gradients["log_probs"], expected)
    assert found["loss"] == pytest.approx(found["pg_loss"] - 0.5 * found["entropy_loss"])
