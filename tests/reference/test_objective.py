"""Loss, gradients and metrics of whole steps against the dense float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.dense_objective import Options, step_objective
from tests.reference.ragged_batches import (
    Sequence_,
    assert_close,
    flat,
    random_step,
    spoiled,
    tokens,
    totals,
)
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.kl import KlKind
from vime.algorithms.objective import MicrobatchObjective
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.algorithms.score_centering import CenteringTerms

LEAVES = ("log_probs", "entropies", "corrections")
SEEDS = st.integers(0, 2**32 - 1)

OPTIONS = {
    "ppo": Options(),
    "ppo against the sampler": Options(old_is_sampler=True),
    "ppo without stored log-probs": Options(old_is_stored=False, per_token=True),
    "ppo, clip higher, dual clip, per token": Options(eps=0.1, eps_high=0.3, dual=1.5, per_token=True),
    "ppo with TIS": Options(weight="tis", low=0.7, high=1.3),
    "ppo with IcePop": Options(weight="icepop", low=0.7, high=1.4),
    "gspo": Options(sequence_ratio=True, eps=0.02, eps_high=0.04),
    "gspo with OPSM": Options(sequence_ratio=True, opsm_delta=0.02),
    "cispo": Options(objective="cispo", eps=1.0, eps_high=0.2),
    "cispo with TIS": Options(objective="cispo", weight="tis", low=0.2, high=1.2),
    "reinforce": Options(objective="reinforce"),
    "reinforce with TIS": Options(objective="reinforce", weight="tis", low=0.8, high=1.2, per_token=True),
    "reinforce with IcePop": Options(objective="reinforce", weight="icepop", low=0.5, high=1.5),
    "centered": Options(objective="reinforce", centered=True),
    "centered with TIS": Options(objective="reinforce", centered=True, weight="tis", low=0.8, high=1.2),
    "centered with IcePop": Options(objective="reinforce", centered=True, weight="icepop", low=0.8, high=1.2),
    "OPSM": Options(opsm_delta=0.05),
    "entropy": Options(entropy_coef=0.3),
    "KL k1": Options(kl_kind="k1", kl_coef=0.2),
    "KL k2": Options(kl_kind="k2", kl_coef=0.2),
    "KL k3, unbiased": Options(kl_kind="k3", kl_coef=0.2, unbiased=True, per_token=True),
    "low-variance KL, unbiased": Options(kl_kind="low_var_kl", kl_coef=0.2, unbiased=True),
    "KL reported only": Options(kl_kind="k3"),
    "everything": Options(
        eps=0.1, dual=3.0, weight="tis", low=0.5, high=1.5, opsm_delta=0.1, entropy_coef=0.1, kl_kind="low_var_kl",
        kl_coef=0.5, unbiased=True,
    ),
}  # fmt: skip


def config_of(options: Options, **more: Any) -> ObjectiveConfig:
    return ObjectiveConfig(
        estimator=Estimator.GSPO if options.sequence_ratio else Estimator.GRPO,
        policy=PolicyLossSettings(PolicyObjective(options.objective), options.eps, options.eps_high, options.dual),
        calculate_per_token_loss=options.per_token,
        use_rollout_logprobs=options.old_is_sampler,
        entropy_coef=options.entropy_coef,
        use_kl_loss=options.kl_kind is not None,
        kl_loss_coef=options.kl_coef,
        kl_kind=KlKind(options.kl_kind or "k1"),
        use_unbiased_kl=options.unbiased,
        weight_rule=WeightRule(WeightKind(options.weight), options.low, options.high),
        opsm_delta=options.opsm_delta,
        **more,
    )


def product(
    step: Sequence[Sequence_], split: Sequence[Sequence[int]], options: Options, **more: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics summed over the microbatches of `split`, gradients of each leaf [R] in the order of the step)."""
    metrics: dict[str, float] = {}
    gradients = {name: [torch.zeros(item.length) for item in step] for name in LEAVES}
    for members in split:
        chosen = [step[member] for member in members]
        leaves = {name: flat(chosen, name).requires_grad_() for name in LEAVES}
        masses = torch.ones(len(leaves["corrections"]))
        loss, found = MicrobatchObjective(
            config_of(options, **more),
            totals(step),
            tokens(step, members, stored=options.old_is_stored),
            leaves["log_probs"],
            leaves["entropies"],
            centering=CenteringTerms(leaves["corrections"], masses, masses) if options.centered else None,
        ).loss_and_metrics()
        loss.backward()
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                parts = torch.split(leaf.grad, [item.length for item in chosen])
                for member, part in zip(members, parts, strict=True):
                    gradients[name][member] = part
    return metrics, {name: torch.cat(parts) for name, parts in gradients.items()}


def reference(step: Sequence[Sequence_], options: Options) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The same from the dense reference."""
    leaves = [
        {
            name: [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in getattr(item, name)]
            for name in LEAVES
        }
        for item in step
    ]
    loss, metrics = step_objective(step, leaves, options)
    loss.backward()
    slopes = {
        name: [0.0 if value.grad is None else value.grad.item() for leaf in leaves for value in leaf[name]]
        for name in LEAVES
    }
    return metrics, slopes


def assert_equal_metrics(found: dict[str, float], expected: dict[str, float], *, ignore: tuple[str, ...] = ()) -> None:
    assert found.keys() - {"sc_sampler_head_mass", "sc_train_head_mass"} == expected.keys()
    for name, value in expected.items():
        if name not in ignore:
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@settings(max_examples=15)
@given(seed=SEEDS, one_each=st.booleans())
def test_loss_metrics_and_gradients_equal_the_dense_reference(options: Options, seed: int, one_each: bool) -> None:
    step = random_step(seed, token_advantages=seed % 2 == 0)
    split = [[member] for member in range(len(step))] if one_each else [list(range(len(step)))]
    metrics, gradients = product(step, split, options)
    expected, slopes = reference(step, options)
    assert_equal_metrics(metrics, expected)
    for name in LEAVES:
        assert_close(gradients[name], slopes[name])


@settings(max_examples=40)
@given(seed=SEEDS, owners=st.lists(st.integers(0, 3), min_size=7, max_size=7), per_token=st.booleans())
def test_any_split_into_microbatches_and_ranks_gives_the_same_step(
    seed: int, owners: list[int], per_token: bool
) -> None:
    options = Options(**{**asdict(OPTIONS["everything"]), "per_token": per_token})
    step = random_step(seed)
    split = [[member for member in range(len(step)) if owners[member] == owner] for owner in range(4)]
    whole_metrics, whole = product(step, [list(range(len(step)))], options)
    metrics, gradients = product(step, [members for members in split if members], options)
    assert_equal_metrics(metrics, whole_metrics)
    for name in LEAVES:
        assert_close(gradients[name], whole[name], rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_masked_tokens_never_matter_whatever_they_hold(options: Options, value: float) -> None:
    step = random_step(5)
    split = [list(range(len(step)))]
    metrics, gradients = product(step, split, options)
    spoiled_metrics, spoiled_gradients = product(spoiled(step, value), split, options)
    assert spoiled_metrics == metrics
    for name in LEAVES:
        assert torch.equal(spoiled_gradients[name], gradients[name]), name


def test_a_microbatch_without_a_trained_token_adds_exact_zeros() -> None:
    step = random_step(5)
    for item in step[1:]:
        item.mask = [0] * item.length
    metrics, gradients = product(step, [list(range(1, len(step)))], OPTIONS["everything"])
    assert set(metrics.values()) == {0.0}
    assert all(not gradient.any() for gradient in gradients.values())


def test_equal_policies_give_ratio_one_and_no_drift() -> None:
    step = random_step(3)
    for item in step:
        item.old = item.sampler = item.log_probs
    metrics, _ = product(step, [list(range(len(step)))], Options(weight="tis", opsm_delta=1e-4))
    trained = {item.rollout for item in step if sum(item.mask)}
    assert metrics["ois"] == pytest.approx(len(trained) / totals(step).num_rollouts)
    assert [metrics[name] for name in ("ppo_kl", "pg_clipfrac", "tis_abs", "tis_clipfrac", "opsm_clipfrac")] == [0] * 5


def test_mismatch_metrics_are_reported_without_changing_the_loss() -> None:
    step, split = random_step(7), [[0, 1], [2]]
    plain, plain_gradients = product(step, split, Options())
    options = Options(weight="tis", high=1.1)
    found, gradients = product(step, split, options, mismatch_metrics_only=True)
    weighted, _ = product(step, split, options)
    assert found["loss"] == plain["loss"] != weighted["loss"]
    assert found["tis"] == weighted["tis"]
    assert torch.equal(gradients["log_probs"], plain_gradients["log_probs"])
