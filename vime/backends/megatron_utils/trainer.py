"""One rank of the trainer; knows nothing of Ray, queues or recovery."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vime.backends.megatron_utils.arguments import parse_megatron_args
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.shim import prepare_megatron
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import token_counts
from vime.data.merged import MergedMicrobatches
from vime.errors import TrainerError

prepare_megatron()

from megatron.core import parallel_state  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402

from vime.backends.megatron_utils import checkpoint, hf_weights, safetensors_files  # noqa: E402
from vime.backends.megatron_utils.frozen_models import FrozenModels  # noqa: E402
from vime.backends.megatron_utils.loss import METRIC_NAMES, StepLoss  # noqa: E402
from vime.backends.megatron_utils.model import build_model  # noqa: E402
from vime.backends.megatron_utils.optimizer import build_learner  # noqa: E402
from vime.backends.megatron_utils.parallel import (  # noqa: E402
    is_metric_source,
    seed_everything,
    start_parallel,
    stop_parallel,
    sum_over_context,
)
from vime.backends.megatron_utils.preparation import prepared_steps  # noqa: E402
from vime.backends.megatron_utils.schedule import ForwardPass  # noqa: E402

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """Model, optimizer and schedule of one rank.

    Every method except `close` is collective: all ranks call it, in the same order. Use as a context manager or call
    `close`; a process can hold one trainer at a time.
    """

    def __init__(self, config: TrainerConfig, rank: int, world_size: int, init_method: str) -> None:
        """Join the other ranks at `init_method` ("tcp://host:port" or "file:///path") and build the model.

        The weights are random until `load_hf` or `load`. Raises `SettingsError`, `ModelError` or `TrainerError`.
        """
        self._config = config
        self._use_threads()
        self._hf_checkpoint = Path(config.hf_checkpoint)
        self._hf_config = read_hf_config(self._hf_checkpoint)
        self._args = parse_megatron_args(config.megatron_argv, self._hf_config, config, rank, world_size)
        start_parallel(self._args, init_method, config.timeout_s)
        seed_everything(self._args)
        self._core_config = core_transformer_config_from_args(self._args)
        self._core_config.variable_seq_lengths = self._args.pipeline_model_parallel_size > 1
        self._core_config.moe_enable_routing_replay = config.replay_routes
        self._core_config.calculate_per_token_loss = False  # both aggregations are ours; see StepLoss
        self._learner = build_learner(build_model(self._args, self._core_config), self._args, self._core_config)
        self._forward = ForwardPass(self._learner.chunks, self._args, self._core_config, config)
        self._frozen = FrozenModels(self._learner, self._args, self._hf_config, config)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the microbatches this rank trains on; ranks of one model replica share the number."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_parallel_size(self) -> int:
        return int(parallel_state.get_data_parallel_world_size())

    def load_hf(self) -> None:
        """Load the weights of the Hugging Face checkpoint; raises `ModelError` when they don't fit."""
        hf_weights.load_hf_weights(self._learner.chunks, self._hf_checkpoint, self._hf_config)
        self._learner.optimizer.reload_model_params()

    def load_start(self) -> None:
        """Load what a new run starts from: the Hugging Face checkpoint or the reference, and frozen models.

        Raises `ModelError`, `RestoreError` or `SettingsError` when weights are absent or don't fit.
        """
        if self._config.reference is None:
            self.load_hf()
        self._frozen.load_start()

    def prepare(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> Sequence[Sequence[PackedMicrobatch]]:
        """This rank's microbatches of a rollout batch, step by step, with all that its objective needs of them.

        Call it before the first step: old log-probabilities are those of the weights at this moment. Adds
        `reference_log_probs` and `teacher_log_probs` of the frozen models, `old_log_probs` where the ratio is taken
        against them, and `token_advantages` where the estimator needs them.
        Lazy microbatches stay lazy: they are read one after the other, and only what is added is kept. Where nothing
        is added, nothing is read.
        """
        self._use_threads()
        return prepared_steps(steps, self._config.objective, self._frozen, self._scores, self._sum_over_replicas)

    def rollout_trained(self, rollout_id: int) -> None:
        """Call it after the last step of each rollout batch: the reference may follow the actor."""
        self._frozen.rollout_trained(rollout_id)

    def train_step(self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals) -> dict[str, float]:
        """Take one optimizer step on this rank's microbatches and return metrics of the whole step.

        Ranks of one data-parallel share pass the same microbatches; all ranks pass the same number of them. Returns,
        equal on all ranks: what the objective reports, `METRIC_NAMES` first, each aggregated like the loss except
        num_tokens (trained), grad_norm (before clipping) and lr (used in this step).
        Raises `TrainerError`, before any weight changes, when ranks disagree about the number of microbatches or a
        loss or gradient isn't finite.
        """
        self._use_threads()
        self._check_equal_counts(len(microbatches))
        learner = self._learner
        step_loss = StepLoss(
            self._config.objective,
            totals,
            float(len(microbatches) * self.data_parallel_size),
            sum_over_context=sum_over_context(),
        )
        for chunk in learner.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
        self._forward.run(microbatches, step_loss)
        self._check_finite(step_loss)
        lr = learner.learning_rate
        succeeded, grad_norm, _ = learner.optimizer.step()
        if not succeeded:
            raise TrainerError(f"rank {dist.get_rank()}: the optimizer skipped the step on overflow.")
        learner.scheduler.step(self._args.global_batch_size)
        metrics = self._reduce(step_loss)
        _warn_of_free_routes(metrics)
        return {**metrics, "grad_norm": float(grad_norm or 0.0), "lr": lr}

    def log_probs(
        self, microbatches: Sequence[PackedMicrobatch], *, replay_nucleus: bool = True, replay_routes: bool = True
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens under the current weights, one array [R] per microbatch.

        Among the recorded nucleus where there is one, unless `replay_nucleus` is off; with the recorded experts where
        the settings replay them, unless `replay_routes` is off.
        """
        scores = self._scores(microbatches, replay_nucleus=replay_nucleus, replay_routes=replay_routes)
        return [log_probs for (log_probs,) in scores]

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in a fixed order; rank 0 gets them, every rank has to iterate."""
        return hf_weights.iterate_hf_weights(self._learner.chunks, self._hf_config)

    def save_hf(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, with configuration and tokenizer of the original."""
        if dist.get_rank() == 0:
            safetensors_files.write_checkpoint(self.named_hf_weights(), self._hf_checkpoint, directory)
        else:
            for _ in self.named_hf_weights():
                pass
        dist.barrier()

    def save(self, directory: Path, iteration: int, *, write_tracker: bool = False) -> Path:
        """Write `<directory>/iter_<iteration>` and return it; see `checkpoint.save_checkpoint`."""
        folder = checkpoint.save_checkpoint(
            self._learner, self._args, directory, iteration, write_tracker=write_tracker
        )
        self._frozen.save(folder)
        return folder

    def load(self, directory: Path, iteration: int) -> None:
        """Restore the state that `save` wrote, and the frozen models; see `checkpoint.load_checkpoint`."""
        checkpoint.load_checkpoint(self._learner, self._args, directory, iteration)
        self._frozen.load(checkpoint.checkpoint_folder(directory, iteration))

    def close(self) -> None:
        """Leave the other ranks; a second call does nothing."""
        stop_parallel()

    def __enter__(self) -> MegatronTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scores(
        self,
        microbatches: Sequence[PackedMicrobatch],
        *,
        replay_nucleus: bool = True,
        replay_routes: bool = True,
        with_entropy: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """See `Score`."""
        self._use_threads()
        self._check_equal_counts(len(microbatches))
        for chunk in self._learner.chunks:
            chunk.eval()
        size = self._merged_size(microbatches, replays_routes=replay_routes and self._config.replay_routes)
        source = MergedMicrobatches(microbatches, size) if size > 1 else microbatches
        found = self._forward.scores(
            source, replay_nucleus=replay_nucleus, replay_routes=replay_routes, with_entropy=with_entropy
        )
        return source.taken_apart(found) if isinstance(source, MergedMicrobatches) else found

    def _merged_size(self, microbatches: Sequence[PackedMicrobatch], *, replays_routes: bool) -> int:
        """Neighbours that go through the model together; the same on all ranks. Those with routes go alone."""
        most = self._config.log_probs_max_tokens
        if most is None or replays_routes or self._args.virtual_pipeline_model_parallel_size is not None:
            return 1
        longest: int = max(self._on_all_ranks(max(token_counts(microbatches))))
        return max(1, most // longest)

    def _use_threads(self) -> None:
        if self._config.num_threads is not None:  # a setting of the calling thread, not of the process
            torch.set_num_threads(self._config.num_threads)

    def _check_equal_counts(self, count: int) -> None:
        counts = self._on_all_ranks(count)
        if min(counts) != max(counts) or count == 0:
            listed = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(counts))
            raise TrainerError(
                f"ranks got different numbers of microbatches ({listed}), allowed: one equal number above 0.",
                next_step="Plan the batch again for this number of ranks.",
            )

    def _check_finite(self, step_loss: StepLoss) -> None:
        """Raise on all ranks when a loss or a gradient is NaN or infinite on any of them."""
        chunks = self._learner.chunks
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        finite = [buffer.grad_data.sum().isfinite() for buffer in buffers]
        losses = [metrics["loss"].isfinite() for metrics in step_loss.metrics]
        flag = torch.stack([*finite, *losses]).all().logical_not().float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        bad = [
            index
            for samples, loss_finite in zip(step_loss.sample_indices, losses, strict=True)
            if not loss_finite
            for index in samples
        ]
        suspects = {rank: samples for rank, samples in enumerate(self._on_all_ranks(bad)) if samples}
        what = "loss"
        if not suspects:
            what = "gradient"
            mine = [index for samples in step_loss.sample_indices for index in samples]
            suspects = {rank: samples for rank, samples in enumerate(self._on_all_ranks(mine)) if samples}
        where = "; ".join(f"rank {rank}: samples {_listed(items)}" for rank, items in suspects.items())
        raise TrainerError(
            f"{what} is not finite ({where}); no weight was changed.",
            next_step="Look at these samples, lower --lr, or resume from the last checkpoint.",
        )

    def _reduce(self, step_loss: StepLoss) -> dict[str, float]:
        """Sums over the step of all metrics that any rank reports."""
        own = sorted({name for metrics in step_loss.metrics for name in metrics})
        names = sorted({name for reported in self._on_all_ranks(own) for name in reported})
        total = torch.zeros(len(names), dtype=torch.float64, device=self._forward.device)
        if is_metric_source():
            for metrics in step_loss.metrics:
                total += torch.stack([metrics.get(name, total.new_zeros(())) for name in names]).double()
        dist.all_reduce(total)
        values = dict(zip(names, total.tolist(), strict=True))
        if not all(math.isfinite(value) for value in values.values()):
            raise TrainerError(f"metrics are not finite: {values}.", next_step="Look at the sampler log-probabilities.")
        return {name: values[name] for name in sorted(names, key=_place_of_metric)}

    def _sum_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks that hold different sequences."""
        total = tensor.to(self._forward.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def _on_all_ranks(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


def _warn_of_free_routes(metrics: Mapping[str, float]) -> None:
    replayed, needed = metrics.get("num_replayed_routes", 0.0), metrics.get("num_routes", 0.0)
    if replayed < needed and dist.get_rank() == 0:
        logger.warning("routes were replayed for %d of %d tokens; the others chose experts in turn", replayed, needed)


def _place_of_metric(name: str) -> int:
    """Those that most objectives report come first."""
    return METRIC_NAMES.index(name) if name in METRIC_NAMES else len(METRIC_NAMES)


def _listed(items: Sequence[int], most: int = 16) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item) for item in items[:most]) + rest
