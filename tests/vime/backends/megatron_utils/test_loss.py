"""The documented importance weights, and the scale that undoes Megatron's averages."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.reference.ragged_batches import flat, random_step, tokens, totals
from vime.algorithms.objective_config import LossKind, ObjectiveConfig
from vime.backends.megatron_utils.loss import METRIC_NAMES, StepLoss, icepop_function, vanilla_tis_function

RATIOS = [[0.25, 1.0, 4.0], [8.0]]


def call(function: Callable[..., Any], low: float | None, high: float | None) -> tuple[list[float], dict[str, Any]]:
    """(weights, metrics) for the ratios above, called with the documented keywords."""
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    loss, returned, metrics = function(
        args=SimpleNamespace(tis_clip_low=low, tis_clip=high),
        pg_loss=torch.full((4,), 3.0),
        train_log_probs=[torch.tensor([math.log(ratio) for ratio in ratios]) for ratios in RATIOS],
        rollout_log_probs=[torch.zeros(3), torch.zeros(1)],
        loss_masks=masks,
        total_lengths=[5, 2],
        response_lengths=[3, 1],
    )
    assert returned is masks
    return (loss / 3.0).tolist(), {name: values.tolist() for name, values in metrics.items()}


def test_truncated_importance_sampling_clamps_the_ratio() -> None:
    weights, metrics = call(vanilla_tis_function, 0.5, 2.0)
    assert weights == pytest.approx([0.5, 1.0, 2.0, 2.0])
    assert metrics["tis"] == pytest.approx([0.25, 1.0, 4.0, 8.0])
    assert metrics["tis_clipfrac"] == [1.0, 0.0, 1.0, 1.0]
    assert metrics["tis_abs"] == pytest.approx([0.75, 0.0, 3.0, 7.0])


def test_icepop_drops_what_leaves_the_band() -> None:
    assert call(icepop_function, 0.5, 4.5)[0] == pytest.approx([0.0, 1.0, 4.0, 0.0])


def test_icepop_without_bounds_takes_a_half_to_five() -> None:
    assert call(icepop_function, None, None)[0] == pytest.approx([0.0, 1.0, 4.0, 0.0])


def test_users_can_import_the_weights_without_megatron() -> None:
    code = "import sys, vime.backends.megatron_utils.loss; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_step_loss_scales_what_megatron_averages_and_reports_every_microbatch() -> None:
    step = random_step(5)
    step_loss = StepLoss(ObjectiveConfig(), totals(step), backward_scale=8.0)
    gradients, scaled = [], 0.0
    for member in range(len(step)):
        microbatch = SimpleNamespace(**vars(tokens(step, [member])), routes=None)
        log_probs = flat([step[member]], "log_probs").requires_grad_()
        loss, nothing = step_loss(microbatch, log_probs, flat([step[member]], "entropies"))  # type: ignore[arg-type]
        loss.backward()
        gradients.append(log_probs.grad)
        scaled += loss.item()
        assert nothing == {}
    assert [set(metrics) for metrics in step_loss.metrics] == [set(METRIC_NAMES)] * len(step)
    assert step_loss.sample_indices == [(member,) for member in range(len(step))]
    assert scaled == pytest.approx(8.0 * sum(metrics["loss"].item() for metrics in step_loss.metrics))
    assert sum(metrics["num_tokens"].item() for metrics in step_loss.metrics) == sum(sum(item.mask) for item in step)


@pytest.mark.parametrize(
    "config",
    [
        ObjectiveConfig(),
        ObjectiveConfig(calculate_per_token_loss=True, entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.3),
        ObjectiveConfig(loss_kind=LossKind.SUPERVISED),
    ],
)
def test_each_samples_part_of_the_loss_is_what_it_adds_alone(config: ObjectiveConfig) -> None:
    step = random_step(3)
    members = list(range(len(step)))
    together, alone = (StepLoss(config, totals(step), backward_scale=1.0) for _ in range(2))
    for loss, microbatches in ((together, [members]), (alone, [[member] for member in members])):
        for numbers in microbatches:
            sequences = [step[number] for number in numbers]
            microbatch = SimpleNamespace(**vars(tokens(step, numbers)), routes=None)
            loss(microbatch, flat(sequences, "log_probs"), flat(sequences, "entropies"))  # type: ignore[arg-type]
    losses = [metrics["loss"].item() for metrics in alone.metrics]
    assert together.sample_losses == pytest.approx(dict(enumerate(losses)), rel=1e-5, abs=1e-7)
    assert sum(together.sample_losses.values()) == pytest.approx(together.metrics[0]["loss"].item(), rel=1e-5)
    assert len({round(loss, 9) for loss in losses}) > 2


def test_a_reducer_of_the_users_own_leaves_no_losses_of_samples() -> None:
    step = random_step(3)
    config = ObjectiveConfig(reducer=lambda *_: lambda term: term.sum())
    loss = StepLoss(config, totals(step), backward_scale=1.0)
    microbatch = SimpleNamespace(**vars(tokens(step, list(range(len(step))))), routes=None)
    loss(microbatch, flat(step, "log_probs"), flat(step, "entropies"))  # type: ignore[arg-type]
    assert loss.sample_losses == {}


def test_a_step_keeps_of_each_trained_sample_what_the_trainer_made_of_its_tokens() -> None:
    step = random_step(3, token_advantages=True)
    step[1].mask = [0] * step[1].length
    loss = StepLoss(ObjectiveConfig(), totals(step), backward_scale=1.0)
    for numbers in ([0, 1], list(range(2, len(step)))):
        sequences = [step[number] for number in numbers]
        microbatch = SimpleNamespace(**vars(tokens(step, numbers)), routes=None)
        loss(microbatch, flat(sequences, "log_probs").requires_grad_(), flat(sequences, "entropies"))  # type: ignore[arg-type]
    found = loss.tokens.by_sample()
    assert found.keys() == {number for number, sequence in enumerate(step) if any(sequence.mask)}, "others only fill"
    for number, sample in found.items():
        sequence = step[number]
        gaps = [abs(s - t) for s, t, m in zip(sequence.sampler, sequence.log_probs, sequence.mask, strict=True) if m]
        assert sample.log_probs.tolist() == pytest.approx(sequence.log_probs)
        assert sample.advantages.tolist() == pytest.approx(sequence.advantages)
        assert sample.mean_gap == pytest.approx(sum(gaps) / len(gaps))
