"""The head's terms against dense float64, and that no full matrix of logits is made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.vime.backends.megatron_utils.dense_head import (
    HeadCase,
    Weighting,
    band_pass,
    dense_terms,
    make_case,
    no_weight,
    truncated,
    truncated_below_one,
)
from vime.algorithms.importance import WeightKind, WeightRule
from vime.backends.megatron_utils.head.projection import Projection, bf16_parts, projection_of
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms, Nucleus, TopKCandidates
from vime.backends.megatron_utils.logprob import response_log_probs
from vime.errors import ModelError

RULES: dict[str, tuple[WeightRule | None, Weighting | None]] = {
    "not_centred": (None, None),
    "unweighted": (WeightRule(), no_weight),
    "tis": (WeightRule(WeightKind.TIS, 0.5, 1.3), truncated),
    "tis_below_one": (WeightRule(WeightKind.TIS, 0.2, 0.8), truncated_below_one),
    "icepop": (WeightRule(WeightKind.ICEPOP, 0.4, 2.5), band_pass),
}
NAMES = ("log_prob", "entropy", "sc_correction", "sc_train_head_mass", "sc_sampler_head_mass")


def run(
    case: HeadCase,
    options: HeadOptions,
    rule: WeightRule | None = None,
    leaves: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    with_entropy: bool = True,
) -> HeadTerms:
    hidden, weight = leaves or (case.hidden, case.weight)
    return response_log_probs(
        hidden,
        weight,
        case.targets,
        options,
        with_entropy=with_entropy,
        candidates=case.candidates,
        nucleus=case.nucleus,
        rule=rule,
    )


def loss_of(terms: HeadTerms) -> torch.Tensor:
    """A different factor for every row and term."""
    factors = torch.linspace(-1, 2, len(terms.log_prob), dtype=terms.log_prob.dtype)
    loss = (terms.log_prob * factors).sum()
    if terms.entropy is not None:
        loss = loss + 0.3 * (terms.entropy * factors.flip(0)).sum()
    if terms.sc_correction is not None:
        loss = loss + 0.7 * (terms.sc_correction * factors.roll(3)).sum()
    return loss


def assert_near(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` times the greatest magnitude."""
    if found is None or expected is None:
        assert found is expected
        return
    expected = expected.detach()
    assert (found.detach().double() - expected).abs().max() <= tolerance * expected.abs().max()


def assert_equals_dense(
    case: HeadCase, options: HeadOptions, rule: WeightRule | None, f: Weighting | None, tolerance: float = 1e-5
) -> None:
    leaves, dense_leaves = case.fresh(), case.fresh(torch.float64)
    found, expected = run(case, options, rule, leaves), dense_terms(case, *dense_leaves, options, f)
    loss_of(found).backward()
    loss_of(expected).backward()
    for name in NAMES:
        assert_near(getattr(found, name), getattr(expected, name), tolerance)
    for leaf, dense_leaf in zip(leaves, dense_leaves, strict=True):
        assert_near(leaf.grad, dense_leaf.grad, tolerance)


def test_hand_computed_softmax_of_five_tokens() -> None:
    # logits / temperature = [0, 1, 2, 3, 4] / 2; sum of exponentials = 1 + 1.648721 + 2.718282 + 4.481689 + 7.389056.
    hidden, weight = torch.tensor([[1.0]]), torch.arange(5.0)[:, None]
    terms = response_log_probs(hidden, weight, torch.tensor([3]), HeadOptions(5, temperature=2.0))
    assert terms.log_prob.item() == pytest.approx(1.5 - math.log(17.237748), abs=1e-6)
    probabilities = [math.exp(index / 2) / 17.237748 for index in range(5)]
    assert terms.entropy is not None
    assert terms.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("kind", "rule"), [("plain", "not_centred"), *((kind, rule) for kind in ("top_k", "nucleus") for rule in RULES)]
)
def test_values_and_gradients_equal_dense_float64(kind: str, rule: str, temperature: float, seed: int) -> None:
    options = HeadOptions(41, temperature, chunk_rows=4, tile_columns=10)
    assert_equals_dense(make_case(kind, seed=seed), options, *RULES[rule])


@pytest.mark.parametrize("kind", ["top_k", "nucleus"])
def test_size_of_blocks_does_not_matter(kind: str) -> None:
    case, rule = make_case(kind), RULES["tis"][0]
    whole, *others = (
        run(case, HeadOptions(41, chunk_rows=rows, tile_columns=columns), rule)
        for rows, columns in [(100, 100), (1, 1), (13, 41), (5, 7), (2, 40)]
    )
    for other in others:
        for name in NAMES:
            torch.testing.assert_close(getattr(other, name), getattr(whole, name), rtol=2e-6, atol=2e-6)


def test_terms_without_entropy_are_the_same() -> None:
    case, options, rule = make_case("top_k"), HeadOptions(41), RULES["tis"][0]
    full, bare = run(case, options, rule), run(case, options, rule, with_entropy=False)
    assert bare.entropy is None
    assert torch.equal(full.log_prob, bare.log_prob)
    assert full.sc_correction is not None
    assert bare.sc_correction is not None
    torch.testing.assert_close(full.sc_correction, bare.sc_correction)


@pytest.mark.parametrize("kind", ["top_k", "nucleus"])
@pytest.mark.parametrize("rule", ["unweighted", "tis", "icepop"])
def test_correction_and_its_gradient_vanish_when_trainer_and_sampler_agree(kind: str, rule: str) -> None:
    case = make_case(kind)
    log_p = (case.hidden.double() @ case.weight.double().t()).log_softmax(-1)
    if case.candidates is not None:
        own = log_p.gather(1, case.candidates.ids.long()).float()
        case = replace(case, candidates=replace(case.candidates, log_probs=own))
    if case.nucleus is not None:
        parts = [log_p[row][_recorded_ids(case.nucleus, row)].log_softmax(0).float() for row in range(13)]
        case = replace(case, nucleus=replace(case.nucleus, log_probs=torch.cat(parts)))
    leaves = case.fresh()
    terms = run(case, HeadOptions(41), RULES[rule][0], leaves)
    assert terms.sc_correction is not None
    terms.sc_correction.sum().backward()
    assert terms.sc_correction.abs().max() < 1e-5
    assert all(leaf.grad is not None and leaf.grad.abs().max() < 1e-5 for leaf in leaves)


def _recorded_ids(nucleus: Nucleus, row: int) -> torch.Tensor:
    begin, end = nucleus.offsets[row : row + 2].tolist()
    return nucleus.ids[begin:end].long()


@pytest.mark.parametrize("rule", ["unweighted", "tis", "icepop"])
def test_a_tail_of_one_thousandth_keeps_its_digits(rule: str) -> None:
    case = _case_with_tail(1e-3)
    terms = run(case, HeadOptions(41), RULES[rule][0])
    assert terms.sc_train_head_mass is not None
    assert 0.9e-3 < 1 - terms.sc_train_head_mass.max() < 1.1e-3
    assert_equals_dense(case, HeadOptions(41), *RULES[rule])


@pytest.mark.parametrize("rule", ["unweighted", "tis", "icepop"])
@pytest.mark.parametrize("tail", [1e-5, 1e-8, 1e-30])
def test_a_tail_that_almost_vanishes_gives_finite_and_bounded_gradients(rule: str, tail: float) -> None:
    case = _case_with_tail(tail)
    leaves = case.fresh()
    terms = run(case, HeadOptions(41), RULES[rule][0], leaves)
    assert terms.sc_correction is not None
    terms.sc_correction.sum().backward()
    assert terms.sc_correction.isfinite().all()
    assert all(leaf.grad is not None and leaf.grad.abs().max() < 1e7 for leaf in leaves)


def _case_with_tail(mass: float) -> HeadCase:
    """Hidden states are the logits; the trainer's tail has this mass, the sampler's is half as heavy."""
    case = make_case("top_k", rows=7)
    candidates = case.candidates
    assert candidates is not None
    ids = candidates.ids.long()
    chance = torch.Generator().manual_seed(4)
    head, others = torch.rand(7, 6, generator=chance).double(), torch.rand(7, 41, generator=chance).double()
    others = others.scatter(1, ids, -torch.inf)
    logits = others.log_softmax(-1) + math.log(mass)
    logits = logits.scatter(1, ids, head.log_softmax(-1) + math.log1p(-mass)).float()
    sampler = (head + 3.0 * torch.rand(7, 6, generator=chance)).log_softmax(-1) + math.log1p(-mass / 2)
    return HeadCase(logits, torch.eye(41), case.targets, TopKCandidates(candidates.ids, sampler.float()))


def test_one_token_nucleus_has_neither_correction_nor_policy_gradient() -> None:
    targets = torch.tensor([3, 8])
    nucleus = Nucleus(targets.int(), torch.tensor([0, 1, 2]), torch.zeros(2))
    case = replace(make_case("plain", rows=2), targets=targets, nucleus=nucleus)
    leaves = case.fresh()
    terms = run(case, HeadOptions(41), WeightRule(), leaves)
    assert terms.sc_correction is not None
    (terms.log_prob.sum() + terms.sc_correction.sum()).backward()
    assert terms.log_prob.tolist() == [0.0, 0.0]
    assert terms.sc_correction.tolist() == [0.0, 0.0]
    assert all(leaf.grad is not None and leaf.grad.abs().max() < 1e-7 for leaf in leaves)


def test_trainer_renormalised_on_a_recorded_support_of_three_equals_the_sampler() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [2.0], [3.0], [9.0]])
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 3])
    terms = response_log_probs(hidden, weight, torch.tensor([2]), HeadOptions(5), nucleus=Nucleus(ids, offsets))
    assert terms.log_prob.item() == pytest.approx(2 - math.log(math.e + math.e**2 + math.e**3), abs=1e-6)


def test_nucleus_far_below_the_most_probable_token_keeps_its_digits() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[-1000.0], [-999.0], [0.0]])
    nucleus = Nucleus(torch.tensor([0, 1]), torch.tensor([0, 2]))
    terms = response_log_probs(hidden, weight, torch.tensor([1]), HeadOptions(3), nucleus=nucleus)
    assert terms.log_prob.item() == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)


@pytest.mark.parametrize("kind", ["plain", "top_k", "nucleus"])
def test_rows_without_a_gradient_never_matter(kind: str) -> None:
    case = make_case(kind)
    rule = None if kind == "plain" else WeightRule()
    hidden, weight = case.fresh()
    with torch.no_grad():
        hidden[4], hidden[9] = torch.nan, torch.inf
    mask = torch.ones(13, dtype=torch.bool)
    mask[[4, 9]] = False
    options = HeadOptions(41, chunk_rows=4, tile_columns=10)

    def masked_loss(terms: HeadTerms) -> torch.Tensor:
        values = [value for value in (terms.log_prob, terms.entropy, terms.sc_correction) if value is not None]
        return torch.stack([value[mask].sum() for value in values]).sum()

    masked_loss(run(case, options, rule, (hidden, weight))).backward()
    clean = case.fresh()
    masked_loss(run(case, options, rule, clean)).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.equal(hidden.grad[~mask], torch.zeros(2, 16))
    assert clean[0].grad is not None
    assert torch.equal(hidden.grad, clean[0].grad)
    assert clean[1].grad is not None
    assert torch.equal(weight.grad, clean[1].grad)


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient() -> None:
    case = make_case("plain", vocab=30)
    padded = torch.cat([case.weight, torch.full((2, 16), 5.0)]).requires_grad_()
    plain = run(case, HeadOptions(30))
    found = run(case, HeadOptions(30), leaves=(case.hidden, padded))
    found.log_prob.sum().backward()
    assert torch.equal(plain.log_prob, found.log_prob)
    assert padded.grad is not None
    assert padded.grad[30:].abs().max() == 0


def test_head_of_nothing_but_padding_is_refused() -> None:
    with pytest.raises(ModelError, match="vocabulary has 0 entries"):
        run(make_case("plain"), HeadOptions(0))


@pytest.mark.parametrize("wrong", [-1, 30, 40])
@pytest.mark.parametrize("kind", ["plain", "top_k", "nucleus"])
def test_ids_outside_of_the_vocabulary_are_refused_with_id_and_place(kind: str, wrong: int) -> None:
    case = make_case(kind, vocab=30)
    what, ids, place = {
        "plain": ("target id", case.targets, [7]),
        "top_k": ("candidate id", getattr(case.candidates, "ids", None), [3, 2]),
        "nucleus": ("nucleus id", getattr(case.nucleus, "ids", None), [11]),
    }[kind]
    assert ids is not None
    ids[tuple(place)] = wrong
    padded = torch.cat([case.weight, torch.zeros(20, 16)])  # the id exists as a row of the head, not as a token
    with pytest.raises(ModelError) as caught:
        run(case, HeadOptions(30), WeightRule() if kind == "top_k" else None, (case.hidden, padded))
    assert f"{what} {wrong} at {place} is outside of the vocabulary, allowed: 0 to 29" in str(caught.value)


@pytest.mark.parametrize("offsets", [[0, 2], [0, 2, 4], [1, 2, 3], [0, 4, 3], [0, -1, 3]])
def test_nucleus_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    case = make_case("plain", rows=2)
    case = replace(case, nucleus=Nucleus(torch.tensor([1, 2, 3]), torch.tensor(offsets)))
    with pytest.raises(ModelError, match="allowed: 2 rows that never fall from 0 to the 3 recorded ids"):
        run(case, HeadOptions(41))


def test_centering_without_anything_recorded_is_refused() -> None:
    case = make_case("nucleus")
    assert case.nucleus is not None
    for bare in (make_case("plain"), replace(case, nucleus=replace(case.nucleus, log_probs=None))):
        with pytest.raises(ValueError, match="needs candidates, or a nucleus with log-probabilities"):
            run(bare, HeadOptions(41), WeightRule())
    with pytest.raises(ValueError, match="got both"):
        run(replace(case, candidates=make_case("top_k").candidates), HeadOptions(41))


def test_bf16_weights_are_multiplied_in_float32() -> None:
    case = make_case("plain", rows=64, vocab=40)
    leaves = case.fresh(torch.bfloat16)
    dense = (leaves[0].double() @ leaves[1].double().t()).log_softmax(-1).gather(1, case.targets[:, None])[:, 0]
    exact = run(case, HeadOptions(40), leaves=leaves).log_prob
    rough = run(case, HeadOptions(40, fp32=False), leaves=leaves).log_prob
    assert (exact - dense).abs().max() < 1e-5
    assert (rough - dense).abs().max() > 1e-3
    for log_prob in (exact, rough):
        found = torch.autograd.grad(log_prob.sum(), leaves)
        expected = torch.autograd.grad(dense.sum(), leaves, retain_graph=True)
        for leaf, reference in zip(found, expected, strict=True):
            assert leaf.dtype == torch.bfloat16
            assert_near(leaf, reference, 0.02)


def test_no_more_logits_than_a_block_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    original = Projection.logits

    def counted(self: Projection, rows: slice, tile: torch.Tensor, temperature: float) -> torch.Tensor:
        logits = original(self, rows, tile, temperature)
        seen.append(logits.shape)
        return logits

    monkeypatch.setattr(Projection, "logits", counted)
    case = make_case("top_k", rows=50, vocab=41)
    leaves = case.fresh()
    loss_of(run(case, HeadOptions(41, chunk_rows=8, tile_columns=10), WeightRule(), leaves)).backward()
    assert max(rows for rows, _ in seen) == 8
    assert max(columns for _, columns in seen) == 10
    assert sum(rows * columns for rows, columns in seen) == 2 * 50 * 41, "every logit once forward and once backward"


def test_two_parts_in_bf16_hold_a_float32_number_to_16_bits() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 5, 128)
    parts = bf16_parts(values)
    both = parts[:64].double() + parts[64:].double()
    assert ((both - values).abs() <= 2**-16 * values.abs()).all()
    assert ((parts[:64].double() - values).abs() > 2**-10 * values.abs()).any(), "one part alone doesn't"


@pytest.mark.gpu
def test_gradients_of_bf16_weights_on_a_gpu_are_as_exact_as_in_float32() -> None:
    chance = torch.Generator("cuda").manual_seed(0)
    hidden, tile = (torch.randn(size, 256, device="cuda", generator=chance).bfloat16() for size in (64, 1000))
    gradient = torch.randn(64, 1000, device="cuda", generator=chance)
    to_hidden, to_tile = torch.zeros(64, 256, device="cuda"), torch.zeros(1000, 256, device="cuda")
    projection = projection_of(hidden, tile, fp32=True)
    projection.add_gradients(slice(0, 64), gradient, tile, to_hidden=to_hidden, to_tile=to_tile)
    assert_near(to_hidden, gradient.double() @ tile.double(), 1e-5)
    assert_near(to_tile, gradient.double().t() @ hidden.double(), 1e-5)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    case = make_case("top_k")
    for frozen in (0, 1):
        leaves = case.fresh()
        leaves[frozen].requires_grad_(False)
        loss_of(run(case, HeadOptions(41), WeightRule(), leaves)).backward()
        assert leaves[frozen].grad is None
        both = case.fresh()
        loss_of(run(case, HeadOptions(41), WeightRule(), both)).backward()
        assert leaves[1 - frozen].grad is not None
        assert both[1 - frozen].grad is not None
        assert torch.equal(leaves[1 - frozen].grad, both[1 - frozen].grad)


@pytest.mark.parametrize("kind", ["plain", "top_k", "nucleus"])
def test_no_rows_give_no_values_and_zero_gradients(kind: str) -> None:
    case = make_case(kind, rows=13)
    empty = HeadCase(case.hidden[:0], case.weight, case.targets[:0])
    if case.candidates is not None:
        empty = replace(empty, candidates=TopKCandidates(case.candidates.ids[:0], case.candidates.log_probs[:0]))
    if case.nucleus is not None:
        empty = replace(empty, nucleus=Nucleus(case.nucleus.ids[:0], torch.zeros(1), torch.zeros(0)))
    leaves = empty.fresh()
    terms = run(empty, HeadOptions(41), None if kind == "plain" else WeightRule(), leaves)
    loss_of(terms).backward()
    assert terms.log_prob.shape == (0,)
    assert leaves[1].grad is not None
    assert leaves[1].grad.abs().max() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "gradient_tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kind", ["plain", "top_k", "nucleus"])
def test_terms_on_a_gpu_equal_dense_float64(kind: str, dtype: torch.dtype, gradient_tolerance: float) -> None:
    case = make_case(kind, rows=60, vocab=500)
    case = replace(case, hidden=case.hidden.to(dtype), weight=case.weight.to(dtype))
    moved = HeadCase(
        case.hidden,
        case.weight,
        case.targets.cuda(),
        case.candidates and TopKCandidates(case.candidates.ids.cuda(), case.candidates.log_probs.cuda()),
        case.nucleus and _to_gpu(case.nucleus),
    )
    rule, f = RULES["not_centred" if kind == "plain" else "tis"]
    leaves = case.hidden.cuda().requires_grad_(), case.weight.cuda().requires_grad_()
    dense_leaves = case.fresh(torch.float64)
    options = HeadOptions(500, 0.8, chunk_rows=16, tile_columns=128)
    found, expected = run(moved, options, rule, leaves), dense_terms(case, *dense_leaves, options, f)
    on_cpu = {name: getattr(found, name) for name in NAMES}
    loss_of(HeadTerms(**{name: None if value is None else value.cpu() for name, value in on_cpu.items()})).backward()
    loss_of(expected).backward()
    for name in NAMES:
        value = getattr(found, name)
        assert_near(None if value is None else value.cpu(), getattr(expected, name))
    for leaf, dense_leaf in zip(leaves, dense_leaves, strict=True):
        assert leaf.grad is not None
        assert_near(leaf.grad.cpu(), dense_leaf.grad, gradient_tolerance)


def _to_gpu(nucleus: Nucleus) -> Nucleus:
    assert nucleus.log_probs is not None
    return Nucleus(nucleus.ids.cuda(), nucleus.offsets.cuda(), nucleus.log_probs.cuda())
