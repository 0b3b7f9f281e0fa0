"""One model that learns: its chunks, optimizer and schedule on this rank. An actor is one, a critic another."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils import checkpoint
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.host_memory import HostMemory
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.optimizer import build_learner, clear_state, learner_tensors
from vime.backends.megatron_utils.parallel import is_metric_source, on_all_ranks
from vime.backends.megatron_utils.parameter_digests import digests_of
from vime.backends.megatron_utils.parameter_names import global_parameters
from vime.backends.megatron_utils.trained_parameters import TrainedParameters
from vime.errors import TrainerError


class StepReport(Protocol):
    """What the loss of a step has recorded of this rank's microbatches."""

    @property
    def metrics(self) -> Sequence[dict[str, torch.Tensor]]:
        """Scalars by name of each microbatch, `loss` among them; sums over microbatches and ranks are what counts."""

    @property
    def sample_indices(self) -> Sequence[tuple[int, ...]]:
        """Samples of each microbatch, in the same order."""


class TrainedModel:
    """Takes optimizer steps, and keeps and gives back what it has learned.

    Needs the process groups of `start_parallel`. All methods but those of its memory are collective. What works on the
    weights takes the model's turn on the device first.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        args: argparse.Namespace,
        core_config: TransformerConfig,
        config: TrainerConfig,
        turns: DeviceTurns,
    ) -> None:
        """Take the chunks of `build_model`; the optimizer follows `args`, which have to be Megatron's current ones.

        Raises `SettingsError` for lists of parameter names that don't fit the model.
        """
        self.args, self.core_config = args, core_config
        self.device = training_device()
        TrainedParameters(config.only_train_params, config.freeze_params).apply(chunks)
        self.learner = build_learner(
            chunks,
            args,
            core_config,
            stateless_adam=config.stateless_adam,
            saves_state=config.saves_optimizer,
        )
        self._resets_optimizer = config.reset_optimizer_states
        self._memory = HostMemory()
        self._turns = turns

    def train_step(self, num_microbatches: int, report: StepReport, run: Callable[[], None]) -> dict[str, float]:
        """Take one optimizer step; `run` goes forward and backward through the microbatches and fills `report`.

        Returns the report's metrics summed over microbatches and ranks, equal on all ranks, with grad_norm (before
        clipping) and lr (used in this step).
        Raises `TrainerError`, before any weight changes, when ranks disagree about the number of microbatches or a
        loss or gradient isn't finite.
        """
        check_equal_counts(num_microbatches)
        self.take_turn()
        learner = self.learner
        for chunk in learner.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
        run()
        self._check_finite(report)
        lr = max(on_all_ranks(learner.learning_rate))  # a rank may have nothing to train
        succeeded, grad_norm, _ = learner.optimizer.step()
        if not succeeded:
            raise TrainerError(f"rank {dist.get_rank()}: the optimizer skipped the step on overflow.")
        learner.scheduler.step(self.args.global_batch_size)
        return {**self._reduce(report), "grad_norm": float(grad_norm or 0.0), "lr": lr}

    def parameter_digests(self) -> dict[str, str]:
        """Digest of each of this rank's parameters by its name in the whole model; experts of a layer share one."""
        self.take_turn()
        return digests_of(global_parameters(self.learner.chunks))

    def finish_batch(self) -> None:
        """After the last step of a rollout batch: forget the optimizer's state where the settings ask for it."""
        if self._resets_optimizer:
            self.take_turn()
            clear_state(self.learner)

    def save(self, directory: Path, iteration: int, *, write_tracker: bool = False) -> Path:
        """Write `<directory>/iter_<iteration>` and return it; see `checkpoint.save_checkpoint`."""
        self.take_turn()
        return checkpoint.save_checkpoint(self.learner, self.args, directory, iteration, write_tracker=write_tracker)

    def load(self, directory: Path, iteration: int) -> None:
        """Restore the state that `save` wrote; see `checkpoint.load_checkpoint`."""
        self.take_turn()
        checkpoint.load_checkpoint(self.learner, self.args, directory, iteration)

    def save_into(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint into `folder`; see `checkpoint.save_into`."""
        self.take_turn()
        checkpoint.save_into(self.learner, self.args, folder, iteration)

    def load_from(self, folder: Path) -> None:
        """Restore the checkpoint in `folder`; see `checkpoint.load_from`."""
        self.take_turn()
        checkpoint.load_from(self.learner, self.args, folder)

    def evaluate_only(self) -> None:
        """Before a pass without gradients."""
        self.take_turn()
        for chunk in self.learner.chunks:
            chunk.eval()

    def take_turn(self) -> None:
        """Be on the device, whoever else was there."""
        self._turns.take(self)

    def move_out(self) -> int:
        """Move weights and optimizer state into host memory and drop the gradients; the bytes of the device freed."""
        if self._memory.is_out:
            return 0
        self.learner.optimizer.zero_grad()
        kept, cleared = learner_tensors(self.learner)
        return self._memory.move_out(self._on_device(kept), self._on_device(cleared))

    def move_in(self) -> None:
        """Be as before `move_out`, bit by bit, with gradients of zero."""
        self._memory.move_in()

    def _on_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self.device.type]

    def _check_finite(self, report: StepReport) -> None:
        """Raise on all ranks when a loss or a gradient is NaN or infinite on any of them."""
        chunks = self.learner.chunks
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        finite = [buffer.grad_data.sum().isfinite() for buffer in buffers]
        losses = [metrics["loss"].isfinite() for metrics in report.metrics]
        always = torch.ones((), dtype=torch.bool, device=self.device)  # a rank may have neither
        flag = torch.stack([always, *finite, *losses]).all().logical_not().float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        bad = [
            index
            for samples, loss_finite in zip(report.sample_indices, losses, strict=True)
            if not loss_finite
            for index in samples
        ]
        suspects = {rank: samples for rank, samples in enumerate(on_all_ranks(bad)) if samples}
        what = "loss"
        if not suspects:
            what = "gradient"
            mine = [index for samples in report.sample_indices for index in samples]
            suspects = {rank: samples for rank, samples in enumerate(on_all_ranks(mine)) if samples}
        where = "; ".join(f"rank {rank}: samples {_listed(items)}" for rank, items in suspects.items())
        raise TrainerError(
            f"{what} is not finite ({where}); no weight was changed.",
            next_step="Look at these samples, lower --lr, or resume from the last checkpoint.",
        )

    def _reduce(self, report: StepReport) -> dict[str, float]:
        """Sums over the step of all metrics that any rank reports."""
        own = sorted({name for metrics in report.metrics for name in metrics})
        names = sorted({name for reported in on_all_ranks(own) for name in reported})
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if is_metric_source():
            for metrics in report.metrics:
                total += torch.stack([metrics.get(name, total.new_zeros(())).double() for name in names])
        dist.all_reduce(total)
        values: dict[str, float] = dict(zip(names, total.tolist(), strict=True))
        if not all(math.isfinite(value) for value in values.values()):
            raise TrainerError(f"metrics are not finite: {values}.", next_step="Look at the sampler log-probabilities.")
        return values


def check_equal_counts(num_microbatches: int) -> None:
    """Raise `TrainerError` on all ranks when they have different numbers of microbatches, or none; collective."""
    counts = on_all_ranks(num_microbatches)
    if min(counts) != max(counts) or num_microbatches == 0:
        listed = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(counts))
        raise TrainerError(
            f"ranks got different numbers of microbatches ({listed}), allowed: one equal number above 0.",
            next_step="Plan the batch again for this number of ranks.",
        )


def sum_over_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """Sum on the CPU over the ranks that hold different sequences; collective."""
    total = tensor.to(training_device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def _listed(items: Sequence[int], most: int = 16) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item) for item in items[:most]) + rest
