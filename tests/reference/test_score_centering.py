"""Both forms of score centering: the output head's terms and the loss made of them, against the dense definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import dense_centering
from tests.reference.dense_centering import Centered
from tests.reference.ragged_batches import Tokens, assert_close
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.objective import MicrobatchObjective
from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.algorithms.score_centering import CenteringTerms
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms, Nucleus, TopKCandidates
from vime.backends.megatron_utils.logprob import response_log_probs
from vime.data.batch import StepTotals

SEEDS = st.integers(0, 2**32 - 1)
VOCABULARY, K = 23, 6
RULES = {
    "none": WeightRule(),
    "tis": WeightRule(WeightKind.TIS, 0.6, 1.4),
    "icepop": WeightRule(WeightKind.ICEPOP, 0.5, 2.0),
}


def rule_of(rule: WeightRule) -> Callable[[float], float]:
    """f in plain Python."""
    if rule.kind is WeightKind.NONE:
        return lambda _: 1.0
    if rule.kind is WeightKind.TIS:
        return lambda ratio: min(max(ratio, rule.low), rule.high)
    return lambda ratio: ratio if rule.low <= ratio <= rule.high else 0.0


@dataclass(frozen=True)
class Batch:
    """R tokens whose logits are `hidden` themselves (the head is the identity); two tokens may be masked."""

    trainer_logits: torch.Tensor
    sampler_log_probs: torch.Tensor
    """[R, V] float64, after temperature"""
    actions: list[int]
    mask: list[bool]
    advantages: list[float]
    temperature: float


def batch(seed: int, *, distance: float = 0.5, sharpness: float = 1.5) -> Batch:
    """Trainer and sampler differ by `distance`; `sharpness` makes the tail thin."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(3, 9, (), generator=generator))
    temperature = [1.0, 0.7][seed % 2]
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * sharpness).float()
    noise = torch.randn(rows, VOCABULARY, generator=generator).double() * distance
    sampler = (logits.double() / temperature + noise).log_softmax(-1).float().double()
    actions = torch.multinomial(sampler.exp(), 1, generator=generator)[:, 0].tolist()
    mask = [row < rows - 2 or seed % 3 > 0 for row in range(rows)]
    advantages = torch.randn(rows, generator=generator).tolist()
    return Batch(logits, sampler, actions, mask, advantages, temperature)


def fused_loss(
    data: Batch, rule: WeightRule, leaf: torch.Tensor, sampled: torch.Tensor, terms: HeadTerms
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(gradient of the logits [R, V], metrics) of the product's loss; all tokens are one sequence."""
    assert terms.entropy is not None
    assert terms.sc_correction is not None
    assert terms.sc_sampler_head_mass is not None
    assert terms.sc_train_head_mass is not None
    mask = torch.tensor(data.mask)
    rows = len(data.mask)
    tokens = Tokens(
        loss_mask=mask,
        total_lengths=torch.tensor([rows + 1]),
        response_lengths=torch.tensor([rows]),
        mask_sums=torch.tensor([float(mask.sum())]),
        advantages=torch.tensor(data.advantages),
        sampler_log_probs=sampled,
        old_log_probs=None,
        reference_log_probs=None,
    )
    loss, metrics = MicrobatchObjective(
        ObjectiveConfig(policy=PolicyLossSettings(PolicyObjective.REINFORCE), weight_rule=rule),
        StepTotals(1, int(mask.sum())),
        tokens,
        terms.log_prob,
        terms.entropy,
        centering=CenteringTerms(terms.sc_correction, terms.sc_sampler_head_mass, terms.sc_train_head_mass),
    ).loss_and_metrics()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad, metrics


def assert_equal(found: tuple[torch.Tensor, dict[str, torch.Tensor]], data: Batch, expected: list[Centered]) -> None:
    """Gradient and metrics of the mean over trained tokens; `expected` has one entry for each of those."""
    trained = sum(data.mask)
    gradient, metrics = found
    for name, values in {
        "sc_correction": [token.correction for token in expected],
        "sc_sampler_head_mass": [token.sampler_mass for token in expected],
        "sc_train_head_mass": [token.train_mass for token in expected],
        "sc_importance_weight": [token.weight for token in expected],
    }.items():
        assert metrics[name].item() == pytest.approx(sum(values) / trained, rel=1e-5, abs=1e-6), name
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def gradients(
    data: Batch,
    rule: WeightRule,
    sampled: torch.Tensor,
    reference: Callable[[int, torch.Tensor], Centered],
    *,
    candidates: TopKCandidates | None = None,
    nucleus: Nucleus | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(product's gradient, reference's gradient), after comparing the metrics.

    `sampled` are the sampler's log-probabilities [R]; `reference` is given a row and its scaled logits [V].
    """
    leaf = data.trainer_logits.clone().requires_grad_()
    terms = response_log_probs(
        leaf,
        torch.eye(VOCABULARY),
        torch.tensor(data.actions),
        HeadOptions(VOCABULARY, data.temperature, chunk_rows=2, tile_columns=5),
        candidates=candidates,
        nucleus=nucleus,
        rule=rule,
    )
    found = fused_loss(data, rule, leaf, sampled.float(), terms)
    dense = data.trainer_logits.double().requires_grad_()
    expected = [reference(row, dense[row] / data.temperature) for row in range(len(data.mask)) if data.mask[row]]
    (torch.stack([token.loss for token in expected]).sum() / sum(data.mask)).backward()
    assert_equal(found, data, expected)
    assert dense.grad is not None
    return found[0], dense.grad


def run_top_k(data: Batch, rule: WeightRule) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gradients`, with the sampler's most likely tokens."""
    log_q, ids = data.sampler_log_probs.topk(K)
    sampled = data.sampler_log_probs.gather(1, torch.tensor(data.actions)[:, None])[:, 0]

    def reference(row: int, logits: torch.Tensor) -> Centered:
        return dense_centering.top_k(
            logits,
            ids[row].tolist(),
            log_q[row].tolist(),
            data.actions[row],
            sampled[row].item(),
            data.advantages[row],
            rule_of(rule),
        )

    return gradients(data, rule, sampled, reference, candidates=TopKCandidates(ids.int(), log_q.float()))


def nucleus_of(data: Batch, top_p: float) -> tuple[list[list[int]], list[torch.Tensor]]:
    """(ids, normalised float32-exact log-probabilities) of each row's support; the sampled token is always in it."""
    supports, log_probs = [], []
    for row, action in enumerate(data.actions):
        order = data.sampler_log_probs[row].argsort(descending=True)
        mass = data.sampler_log_probs[row][order].exp().cumsum(0)
        kept = order[: int((mass < top_p).sum()) + 1].tolist()
        supports.append(kept if action in kept else [*kept, action])
        log_probs.append(data.sampler_log_probs[row][supports[-1]].log_softmax(-1).float().double())
    return supports, log_probs


def run_nucleus(data: Batch, rule: WeightRule, top_p: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gradients`, with what top-p left of the sampler's tokens."""
    supports, log_q = nucleus_of(data, top_p)
    sampled = torch.stack([log_q[row][supports[row].index(action)] for row, action in enumerate(data.actions)])

    def reference(row: int, logits: torch.Tensor) -> Centered:
        return dense_centering.support(
            logits, supports[row], log_q[row].tolist(), data.actions[row], data.advantages[row], rule_of(rule)
        )

    nucleus = Nucleus(
        torch.tensor([token for kept in supports for token in kept], dtype=torch.int32),
        torch.tensor([0, *(len(kept) for kept in supports)]).cumsum(0).int(),
        torch.cat(log_q).float(),
    )
    return gradients(data, rule, sampled, reference, nucleus=nucleus)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=8)
@given(seed=SEEDS)
def test_top_k_head_equals_the_dense_definition(rule: WeightRule, seed: int) -> None:
    assert_close(*run_top_k(batch(seed), rule))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=8)
@given(seed=SEEDS)
def test_recorded_support_equals_the_dense_definition(rule: WeightRule, seed: int) -> None:
    assert_close(*run_nucleus(batch(seed), rule))


def test_top_k_head_keeps_its_digits_down_to_a_tail_of_a_thousandth() -> None:
    found = []
    for seed in range(200):
        data = batch(seed, sharpness=4.0, distance=0.3)
        tail = 1 - data.sampler_log_probs.topk(K)[0].exp().sum(-1)
        train = (data.trainer_logits.double() / data.temperature).softmax(-1)
        train_tail = 1 - train.gather(1, data.sampler_log_probs.topk(K)[1]).sum(-1)
        if 1e-3 <= min(tail.min(), train_tail.min()) <= 2e-3:
            assert_close(*run_top_k(data, RULES["none"]))
            found.append(seed)
    assert found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_vanishing_tail_stays_finite_and_bounded(rule: WeightRule) -> None:
    data = batch(1, sharpness=40.0, distance=20.0)
    gradient, _ = run_top_k(data, rule)
    largest = max(abs(advantage) for advantage in data.advantages)
    assert gradient.abs().max() <= 20 * largest / data.temperature


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("run", [run_top_k, run_nucleus])
def test_the_correction_of_equal_policies_has_no_gradient(
    run: Callable[[Batch, WeightRule], tuple[torch.Tensor, torch.Tensor]], rule: WeightRule
) -> None:
    """What is left is plain REINFORCE: the gradient of -A log p of the sampled token."""
    data = batch(8, distance=0.0)
    gradient, _ = run(data, rule)
    dense = data.trainer_logits.double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    supports, _ = nucleus_of(data, 0.7)
    for row, action in enumerate(data.actions):
        if data.mask[row]:
            kept = list(range(VOCABULARY)) if run is run_top_k else supports[row]
            log_p = (dense[row] / data.temperature)[kept].log_softmax(-1)
            loss = loss - data.advantages[row] * log_p[kept.index(action)] / sum(data.mask)
    loss.backward()
    assert_close(gradient, dense.grad, rel=1e-5)


@pytest.mark.parametrize("run", [run_top_k, run_nucleus])
def test_an_importance_weight_without_a_binding_cap_leaves_nothing_to_correct(
    run: Callable[[Batch, WeightRule], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    data = batch(8)
    gradient, _ = run(data, WeightRule(WeightKind.TIS, 0.0, 1e9))
    supports, log_q = nucleus_of(data, 0.7)
    dense = data.trainer_logits.double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for row, action in enumerate(data.actions):
        if data.mask[row]:
            kept = list(range(VOCABULARY)) if run is run_top_k else supports[row]
            log_q_row = data.sampler_log_probs[row] if run is run_top_k else log_q[row]
            log_p = (dense[row] / data.temperature)[kept].log_softmax(-1)[kept.index(action)]
            weight = (log_p.detach() - log_q_row[kept.index(action)]).exp()
            loss = loss - weight * data.advantages[row] * log_p / sum(data.mask)
    loss.backward()
    assert_close(gradient, dense.grad)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_constant_reward_has_no_expected_gradient_however_far_the_sampler_is(rule: WeightRule) -> None:
    """Over a recorded support, the expectation over the sampler of the gradient is zero for every rule."""
    logits = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kept = [4, 0, 9, 17, 20]
    log_q = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).log_softmax(-1).tolist()

    def expected_gradient(centered: bool) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        for n, action in enumerate(kept):
            token = dense_centering.support(leaf, kept, log_q, action, 1.0, rule_of(rule))
            loss = token.loss if centered else token.loss - token.score
            (math.exp(log_q[n]) * loss).backward()
        assert leaf.grad is not None
        return leaf.grad

    assert expected_gradient(centered=True).abs().max() < 1e-12
    assert expected_gradient(centered=False).abs().max() > 1e-3, "without the correction it drifts"


def test_a_support_of_one_token_trains_nothing() -> None:
    data = batch(2)
    gradient, _ = run_nucleus(data, RULES["none"], top_p=0.0)
    supports, _ = nucleus_of(data, 0.0)
    alone = [row for row, kept in enumerate(supports) if len(kept) == 1]
    assert alone
    assert not gradient[alone].any()
