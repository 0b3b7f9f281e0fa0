"""Loss, gradients and metrics of whole steps against the dense float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.dense_objective import Options
from tests.reference.ragged_batches import assert_close, random_step, spoiled, totals
from tests.reference.run_step import LEAVES, product, reference

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
    "distilled": Options(opd=True, old_is_sampler=True),
    "KL reported only": Options(kl_kind="k3"),
    "KL in the rewards": Options(reward_kl="low_var_kl"),
    "KL of the sampler in the rewards": Options(reward_kl="k2", old_is_sampler=True, per_token=True),
    "everything": Options(
        eps=0.1, dual=3.0, weight="tis", low=0.5, high=1.5, opsm_delta=0.1, entropy_coef=0.1, kl_kind="low_var_kl",
        kl_coef=0.5, unbiased=True,
    ),
}  # fmt: skip


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


@settings(max_examples=15)
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


@pytest.mark.parametrize("options", [Options(objective="reinforce"), Options(), Options(objective="cispo", eps=1.0)])
def test_a_constant_reward_has_no_expected_gradient_on_policy(options: Options) -> None:
    """Every token of a small vocabulary, weighted by its probability; another reward does have a gradient."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def expected_gradient(advantage_of: Callable[[int], float]) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        log_p = leaf.log_softmax(-1)
        slopes = []
        for action, log_prob in enumerate(log_p.tolist()):
            (item,) = random_step(0)[:1]
            item = replace(
                item, mask=[1], log_probs=[log_prob], old=[log_prob], sampler=[log_prob], reference=[0.0],
                teacher=[0.0], entropies=[0.0], advantages=[advantage_of(action)], corrections=[0.0],
            )  # fmt: skip
            _, gradients = product([item], [[0]], options)
            slopes.append(gradients["log_probs"].item())
        (log_p.exp().detach() * torch.tensor(slopes, dtype=torch.float64) * log_p).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert expected_gradient(lambda _: 1.7).abs().max() < 1e-6
    assert expected_gradient(float).abs().max() > 0.1
