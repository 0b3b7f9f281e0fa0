"""Advantages of a rank's whole rollout batch: which estimator, whose function, whitened over whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference.dense_advantages import discounted_returns, gae, whitened
from tests.support.watched_batches import WatchedBatches
from vime.algorithms.kl import KlKind
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.ragged import on_one_rank
from vime.backends.megatron_utils.advantages import with_token_advantages
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import token_counts
from vime.errors import TrainerError


def microbatch(seed: int, lengths: tuple[int, ...], *, reference: bool = True) -> PackedMicrobatch:
    """Sequences of one prompt token and some response tokens; the second of each pair of tokens is masked."""
    rng = np.random.default_rng(seed)
    num = sum(lengths)
    return PackedMicrobatch(
        tokens=rng.integers(0, 9, num + len(lengths)).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(length + 1 for length in lengths)]).astype(np.int32),
        response_lengths=np.array(lengths, np.int32),
        loss_mask=np.concatenate([np.arange(length) % 2 == 0 for length in lengths]).astype(np.uint8),
        sampler_log_probs=-rng.random(num).astype(np.float32),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        mask_sums=np.ones(len(lengths), np.float32),
        sample_indices=np.arange(len(lengths)) + 100 * seed,
        old_log_probs=-rng.random(num).astype(np.float32),
        reference_log_probs=-rng.random(num).astype(np.float32) if reference else None,
        teacher_log_probs=-rng.random(num).astype(np.float32) if reference else None,
        values=rng.normal(size=num).astype(np.float32) if reference else None,
    )


STEPS = [[microbatch(1, (3, 2)), microbatch(2, (4,))], [microbatch(3, (1, 5))]]


def flat_advantages(steps: list[list[PackedMicrobatch]]) -> list[float]:
    result: list[float] = []
    for step in steps:
        for batch in step:
            assert batch.token_advantages is not None
            assert batch.token_advantages.dtype == np.float32
            result += batch.token_advantages.tolist()
    return result


def per_sequence(batch: PackedMicrobatch, values: np.ndarray) -> list[list[float]]:
    return [part.tolist() for part in np.split(values, np.cumsum(batch.response_lengths)[:-1])]


@pytest.mark.parametrize("from_sampler", [True, False])
def test_reinforce_plus_plus_penalises_the_kl_of_the_old_policy_and_discounts(from_sampler: bool) -> None:
    config = ObjectiveConfig(
        estimator=Estimator.REINFORCE_PLUS_PLUS,
        use_rollout_logprobs=from_sampler,
        kl_coef=0.5,
        kl_kind=KlKind.K2,
        gamma=0.9,
    )
    expected: list[float] = []
    for batch in (batch for step in STEPS for batch in step):
        old = batch.sampler_log_probs if from_sampler else batch.old_log_probs
        kl = (old - batch.reference_log_probs) ** 2 / 2
        for reward, of_sequence, mask in zip(
            batch.advantages.tolist(), per_sequence(batch, kl), per_sequence(batch, batch.loss_mask), strict=True
        ):
            expected += discounted_returns(reward, of_sequence, mask, 0.5, 0.9)
    assert flat_advantages(with_token_advantages(STEPS, config, on_one_rank)) == pytest.approx(expected, rel=1e-5)


def test_baseline_variant_is_centred_reward_less_penalty_at_trained_tokens() -> None:
    config = ObjectiveConfig(estimator=Estimator.REINFORCE_PLUS_PLUS_BASELINE, kl_coef=0.5)
    (found,) = with_token_advantages([STEPS[0][:1]], config, on_one_rank)
    batch = STEPS[0][0]
    kl = (batch.sampler_log_probs - batch.reference_log_probs) * batch.loss_mask
    expected = np.repeat(batch.advantages, batch.response_lengths) - 0.5 * kl
    assert flat_advantages([found]) == pytest.approx(expected.tolist(), rel=1e-5)


def test_whitening_covers_all_steps_and_ranks_and_only_trained_tokens() -> None:
    config = ObjectiveConfig(estimator=Estimator.GRPO, normalize_advantages=True)
    spread = [np.repeat(batch.advantages, batch.response_lengths) for step in STEPS for batch in step]
    mask = [batch.loss_mask for step in STEPS for batch in step]
    expected = whitened(np.concatenate(spread).tolist(), np.concatenate(mask).tolist())
    assert flat_advantages(with_token_advantages(STEPS, config, on_one_rank)) == pytest.approx(expected, rel=1e-5)
    # Two ranks with the same sequences have the same mean; the correction of the variance counts all tokens.
    doubled = flat_advantages(with_token_advantages(STEPS, config, lambda sums: 2 * sums))
    count = int(np.concatenate(mask).sum())
    factor = ((2 * count - 1) / (2 * count) / ((count - 1) / count)) ** 0.5
    assert doubled == pytest.approx([value * factor for value in expected], rel=1e-4)


def test_a_custom_function_gets_the_documented_lists_and_its_advantages_are_used() -> None:
    seen: dict[str, Any] = {}

    def own(args: Any, rollout_data: dict[str, Any]) -> None:
        seen.update(rollout_data, args=args)
        rollout_data["advantages"] = [mask * 2.0 for mask in rollout_data["loss_masks"]]
        rollout_data["returns"] = [mask * 3.0 for mask in rollout_data["loss_masks"]]

    config = ObjectiveConfig(custom_advantages=own, hook_args="args", kl_coef=0.5)
    found = with_token_advantages(STEPS, config, on_one_rank)
    assert flat_advantages(found) == [2.0 * kept for step in STEPS for batch in step for kept in batch.loss_mask]
    (batch,) = found[1]
    assert batch.token_returns is not None
    assert batch.token_returns.tolist() == [3.0 * kept for kept in batch.loss_mask]
    assert seen["args"] == "args"
    assert seen["response_lengths"] == [3, 2, 4, 1, 5]
    assert seen["total_lengths"] == [4, 3, 5, 2, 6]
    assert [len(tokens) for tokens in seen["tokens"]] == seen["total_lengths"]
    assert seen["sample_indices"] == [100, 101, 200, 300, 301]
    assert seen["rewards"] == [value for step in STEPS for batch in step for value in batch.advantages.tolist()]
    for name in ("loss_masks", "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs", "values", "kl"):
        assert [len(part) for part in seen[name]] == seen["response_lengths"], name
    batch = STEPS[0][1]
    assert torch.equal(seen["log_probs"][2], torch.tensor(batch.old_log_probs))
    assert seen["kl"][2].tolist() == pytest.approx((batch.sampler_log_probs - batch.reference_log_probs).tolist())


def test_ppo_estimates_from_the_critics_values_and_keeps_the_returns() -> None:
    config = ObjectiveConfig(estimator=Estimator.PPO, kl_coef=0.2, gamma=0.9, lambd=0.8)
    found = with_token_advantages(STEPS, config, on_one_rank)
    for before, after in zip((b for step in STEPS for b in step), (b for step in found for b in step), strict=True):
        kl = before.sampler_log_probs - before.reference_log_probs
        pairs = [
            gae(reward, of_sequence, values, mask, (0.2, 0.9, 0.8))
            for reward, of_sequence, values, mask in zip(
                before.advantages.tolist(),
                *(per_sequence(before, array) for array in (kl, before.values, before.loss_mask)),
                strict=True,
            )
        ]
        assert flat_advantages([[after]]) == pytest.approx([v for advantages, _ in pairs for v in advantages], rel=1e-5)
        assert after.token_returns.tolist() == pytest.approx([v for _, returns in pairs for v in returns], rel=1e-5)


@pytest.mark.parametrize("from_sampler", [True, False])
def test_distillation_comes_after_the_estimator_and_before_whitening(from_sampler: bool) -> None:
    config = ObjectiveConfig(opd_kl_coef=0.5, normalize_advantages=True, use_rollout_logprobs=from_sampler)
    distilled: list[float] = []
    for batch in (batch for step in STEPS for batch in step):
        student = batch.sampler_log_probs if from_sampler else batch.old_log_probs
        plain = np.repeat(batch.advantages, batch.response_lengths)
        distilled += (plain - 0.5 * (student - batch.teacher_log_probs)).tolist()
    expected = whitened(distilled, [kept for step in STEPS for batch in step for kept in batch.loss_mask])
    assert flat_advantages(with_token_advantages(STEPS, config, on_one_rank)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": Estimator.PPO}, r"samples \[100\] have no values of a critic"),
        ({"opd_kl_coef": 1.0}, r"samples \[100\] have no teacher log-probabilities"),
    ],
)
def test_what_an_estimator_lacks_is_named_with_the_samples(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        with_token_advantages([[microbatch(1, (3,), reference=False)]], ObjectiveConfig(**options), on_one_rank)


@pytest.mark.parametrize("missing", ["advantages", "returns"])
def test_a_custom_function_that_sets_too_little_is_refused_by_name(missing: str) -> None:
    def own(args: Any, rollout_data: dict[str, Any]) -> None:  # noqa: ARG001 - the documented signature
        rollout_data["advantages"] = rollout_data["returns"] = list(rollout_data["rollout_log_probs"])
        rollout_data[missing] = rollout_data[missing][:-1]

    said = rf"left rollout_data\['{missing}'\] with lengths \[3, 2, 4, 1\], allowed: \[3, 2, 4, 1, 5\]"
    with pytest.raises(TrainerError, match=said):
        with_token_advantages(STEPS, ObjectiveConfig(custom_advantages=own), on_one_rank)


def test_a_penalty_without_reference_log_probabilities_is_refused() -> None:
    config = ObjectiveConfig(estimator=Estimator.REINFORCE_PLUS_PLUS, kl_coef=0.1)
    with pytest.raises(TrainerError, match="no reference log-probabilities"):
        with_token_advantages([[microbatch(1, (3,), reference=False)]], config, on_one_rank)


def test_without_a_penalty_no_reference_is_needed() -> None:
    config = ObjectiveConfig(estimator=Estimator.REINFORCE_PLUS_PLUS)
    batch = replace(microbatch(1, (3,), reference=False), old_log_probs=None)
    found = with_token_advantages([[batch]], config, on_one_rank)
    assert flat_advantages(found) == pytest.approx([batch.advantages[0]] * 3)


@pytest.mark.parametrize(
    ("options", "num_steps", "needed"),
    [
        ({"use_rollout_logprobs": True}, 4, False),
        ({"use_rollout_logprobs": True, "mismatch_metrics_only": True}, 1, True),
        ({}, 1, False),
        ({}, 2, True),
        ({"kl_coef": 0.1}, 1, True),
        ({"mismatch_metrics_only": True}, 1, True),
        ({"estimator": Estimator.GSPO}, 1, True),
        ({"estimator": Estimator.PPO}, 1, True),
        ({"opd_kl_coef": 1.0}, 1, True),
        ({"estimator": Estimator.CISPO}, 1, False),
    ],
)
def test_old_log_probabilities_are_computed_only_where_the_step_cannot_reuse_its_own(
    options: dict[str, Any], num_steps: int, needed: bool
) -> None:
    config = ObjectiveConfig(**{"use_rollout_logprobs": False, **options})
    assert config.recomputes_old_log_probs(num_steps) is needed


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, False),
        ({"estimator": Estimator.GSPO}, False),
        ({"estimator": Estimator.REINFORCE_PLUS_PLUS_BASELINE}, True),
        ({"normalize_advantages": True}, True),
        ({"opd_kl_coef": 0.0}, True),
        ({"custom_advantages": print}, True),
    ],
)
def test_group_relative_advantages_come_with_the_plan(options: dict[str, Any], needed: bool) -> None:
    assert ObjectiveConfig(**options).has_token_advantages is needed


CONFIGS = [
    ObjectiveConfig(estimator=Estimator.REINFORCE_PLUS_PLUS, kl_coef=0.5, normalize_advantages=True, opd_kl_coef=0.1),
    ObjectiveConfig(custom_advantages=lambda _, data: data.update(own(data)), normalize_advantages=True),
    ObjectiveConfig(custom_advantages=lambda _, data: data.update(own(data)), opd_kl_coef=0.1),
]


def own(data: dict[str, Any]) -> dict[str, Any]:
    values = [r * torch.arange(n) for r, n in zip(data["rewards"], data["response_lengths"], strict=True)]
    return {"advantages": values, "returns": values}


@pytest.mark.parametrize("config", CONFIGS)
def test_microbatches_are_read_without_candidates_and_one_after_the_other(config: ObjectiveConfig) -> None:
    batches = [microbatch(seed, (3, 2)) for seed in range(8)]
    watched = WatchedBatches(batches)
    (prepared,) = with_token_advantages([watched], config, on_one_rank)
    assert watched.num_reads == 0
    assert watched.narrow is not None
    assert watched.narrow.most_held <= 2
    assert list(token_counts(prepared)) == watched.token_counts
    (expected,) = with_token_advantages([batches], config, on_one_rank)
    for found, wanted in zip(prepared, expected, strict=True):
        assert np.array_equal(found.token_advantages, wanted.token_advantages)
        assert np.array_equal(found.token_returns, wanted.token_returns)
        assert np.array_equal(found.tokens, wanted.tokens)
    assert watched.num_reads == len(batches)
