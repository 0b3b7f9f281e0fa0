"""Supervised and custom losses, and any loss computed again, against the dense float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.dense_losses import supervised
from tests.reference.dense_objective import Options
from tests.reference.ragged_batches import Sequence_, assert_close, flat, random_step, spoiled, tokens, totals
from tests.reference.run_step import config_of, reference
from vime.algorithms.objective_config import LossKind, ObjectiveConfig
from vime.backends.megatron_utils.loss import StepLoss
from vime.errors import SettingsError, TrainerError

SEEDS = st.integers(0, 2**32 - 1)


def run(
    step: list[Sequence_], split: list[list[int]], config: ObjectiveConfig
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics summed over the microbatches of `split`, gradients [R] of log-probabilities and entropies)."""
    metrics: dict[str, float] = {}
    gradients = {name: [torch.zeros(item.length) for item in step] for name in ("log_probs", "entropies")}
    for members in split:
        chosen = [step[member] for member in members]
        leaves = {name: flat(chosen, name).requires_grad_() for name in gradients}
        microbatch = cast(Any, WithoutRoutes(tokens(step, members)))
        step_loss = StepLoss(config, totals(step), 1.0)
        loss, _ = step_loss(microbatch, leaves["log_probs"], leaves["entropies"])
        loss.backward()
        for name, value in step_loss.metrics[0].items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                for member, part in zip(members, torch.split(leaf.grad, [item.length for item in chosen]), strict=True):
                    gradients[name][member] = part
    return metrics, {name: torch.cat(parts) for name, parts in gradients.items()}


class WithoutRoutes:
    """A microbatch of a model without experts."""

    def __init__(self, found: Any) -> None:
        self.__dict__.update(vars(found), routes=None)


def whole(step: list[Sequence_]) -> list[list[int]]:
    return [list(range(len(step)))]


@settings(max_examples=25)
@given(seed=SEEDS, per_token=st.booleans(), one_each=st.booleans(), again=st.booleans())
def test_the_likelihood_and_its_gradient_equal_the_dense_reference(
    seed: int, per_token: bool, one_each: bool, again: bool
) -> None:
    step = random_step(seed)
    config = ObjectiveConfig(
        loss_kind=LossKind.SUPERVISED, calculate_per_token_loss=per_token, recomputes_loss=again, entropy_coef=0.3
    )
    metrics, gradients = run(step, [[n] for n in range(len(step))] if one_each else whole(step), config)
    leaves = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in item.log_probs] for item in step]
    loss, expected = supervised(step, leaves, per_token=per_token)
    loss.backward()
    slopes = [0.0 if leaf.grad is None else leaf.grad.item() for of_sequence in leaves for leaf in of_sequence]
    assert metrics.keys() == {"loss", "entropy_loss", "num_tokens"}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert_close(gradients["log_probs"], slopes)
    assert not gradients["entropies"].any(), "there is no entropy bonus"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_masked_tokens_of_a_record_never_matter_whatever_they_hold(value: float) -> None:
    step, config = random_step(5), ObjectiveConfig(loss_kind=LossKind.SUPERVISED)
    metrics, gradients = run(step, whole(step), config)
    spoiled_metrics, spoiled_gradients = run(spoiled(step, value), whole(step), config)
    assert spoiled_metrics == metrics
    assert torch.equal(spoiled_gradients["log_probs"], gradients["log_probs"])


def test_a_loss_computed_again_in_the_backward_pass_is_the_same_and_keeps_nothing_until_then() -> None:
    step = random_step(3)
    options = Options(eps=0.1, dual=3.0, weight="tis", entropy_coef=0.1, kl_kind="low_var_kl", kl_coef=0.5)
    kept = {}
    found = {}
    for again in (False, True):
        saved: list[int] = []

        def count(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        config = config_of(options, recomputes_loss=again)
        leaves = [flat(step, name).requires_grad_() for name in ("log_probs", "entropies")]
        step_loss = StepLoss(config, totals(step), 1.0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss, _ = step_loss(cast(Any, WithoutRoutes(tokens(step, whole(step)[0]))), *leaves)
        kept[again] = sum(saved)
        loss.backward()
        assert len(step_loss.metrics) == 1, "what is reported is reported once"
        found[again] = [step_loss.metrics[0]["loss"], *(leaf.grad for leaf in leaves)]
    for one, other in zip(found[False], found[True], strict=True):
        assert torch.equal(one, other)
    assert kept[True] < kept[False] / 2


def test_a_custom_loss_gets_what_is_documented_and_is_trained() -> None:
    """The policy gradient, written by a user, equals the dense reference of the built-in one."""
    seen: dict[str, Any] = {}

    def own(args: Any, batch: dict[str, Any], log_probs: Any, entropies: Any, reduce: Callable[..., Any]) -> Any:
        seen.update(batch, args=args)
        term = -torch.cat(batch["advantages"]) * log_probs
        return reduce(term) - 0.1 * reduce(entropies), {"mine": reduce(term)}

    step = random_step(11, token_advantages=True)
    config = ObjectiveConfig(loss_kind=LossKind.CUSTOM, custom_loss=own, hook_args="args")
    metrics, gradients = run(step, [[n] for n in range(len(step))], config)
    expected, slopes = reference(step, Options(objective="reinforce", entropy_coef=0.1))
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["mine"] == pytest.approx(expected["pg_loss"], rel=1e-5)
    for name in gradients:
        assert_close(gradients[name], slopes[name])
    last = step[-1]
    assert seen["args"] == "args"
    assert (seen["sample_indices"], seen["response_lengths"]) == ([len(step) - 1], [last.length])
    assert seen["total_lengths"] == [last.prompt_length + last.length]
    documented = ("loss_masks", "advantages", "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs")
    for name, attribute in zip(
        documented, ("mask", "advantages", "sampler", "old", "reference", "teacher"), strict=True
    ):
        assert seen[name][0].tolist() == pytest.approx(getattr(last, attribute)), name


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda log_probs, _: (log_probs, {}), r"a loss of shape \[\d+\], allowed: a tensor with one number"),
        (lambda _, reduce: (1.0, {}), "a loss of type float"),  # noqa: ARG005
        (lambda log_probs, reduce: (reduce(log_probs), {"x": log_probs}), r"the metric x of shape"),
        (lambda log_probs, reduce: (reduce(log_probs.detach()), {}), "depends on no parameter"),
    ],
)
def test_what_a_custom_loss_may_not_return_is_named(returned: Callable[..., Any], said: str) -> None:
    def own(args: Any, batch: Any, log_probs: Any, entropies: Any, reduce: Any) -> Any:  # noqa: ARG001
        return returned(log_probs, reduce)

    step = random_step(1)
    with pytest.raises(TrainerError, match=rf"--custom-loss-function-path returned .*{said}"):
        run(step, whole(step), ObjectiveConfig(loss_kind=LossKind.CUSTOM, custom_loss=own))


def test_a_custom_kind_of_loss_needs_its_function() -> None:
    with pytest.raises(SettingsError, match="both or neither"):
        ObjectiveConfig(loss_kind=LossKind.CUSTOM)


@pytest.mark.parametrize(
    ("options", "num_steps", "needed"),
    [
        ({"loss_kind": LossKind.SUPERVISED, "use_rollout_logprobs": False}, 4, False),
        ({"loss_kind": LossKind.CUSTOM, "custom_loss": print, "use_rollout_logprobs": False}, 1, True),
        ({"loss_kind": LossKind.CUSTOM, "custom_loss": print}, 4, False),
        ({"scores_entropy": True}, 1, True),
    ],
)
def test_old_log_probabilities_are_scored_where_the_kind_of_loss_may_read_them(
    options: dict[str, Any], num_steps: int, needed: bool
) -> None:
    assert ObjectiveConfig(**options).recomputes_old_log_probs(num_steps) is needed


@pytest.mark.parametrize(
    ("options", "advantages", "reference"),
    [
        ({"loss_kind": LossKind.SUPERVISED, "normalize_advantages": True, "kl_coef": 0.1}, False, False),
        ({"computes_advantages": False, "normalize_advantages": True, "use_kl_loss": True}, False, True),
        ({"normalize_advantages": True, "kl_coef": 0.1}, True, True),
    ],
)
def test_a_batch_is_prepared_only_for_what_the_loss_reads(
    options: dict[str, Any], advantages: bool, reference: bool
) -> None:
    config = ObjectiveConfig(**options)
    assert (config.has_token_advantages, config.needs_reference) == (advantages, reference)
