"""One rank of the trainer; knows nothing of Ray, queues or recovery."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vime.backends.megatron_utils.arguments import parse_megatron_args
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.shim import prepare_megatron
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import PreparedMicrobatches

prepare_megatron()

from megatron.core import parallel_state  # noqa: E402

from vime.backends.megatron_utils import hf_weights, safetensors_files  # noqa: E402
from vime.backends.megatron_utils.advantages import with_token_advantages  # noqa: E402
from vime.backends.megatron_utils.loss import METRIC_NAMES, OPTIONAL_METRIC_NAMES, StepLoss  # noqa: E402
from vime.backends.megatron_utils.model import build_core_config, build_model  # noqa: E402
from vime.backends.megatron_utils.parallel import (  # noqa: E402
    seed_everything,
    start_parallel,
    stop_parallel,
    sum_over_context,
    use_threads,
)
from vime.backends.megatron_utils.schedule import ForwardPass  # noqa: E402
from vime.backends.megatron_utils.trained_model import (  # noqa: E402
    TrainedModel,
    check_equal_counts,
    sum_over_replicas,
)

logger = logging.getLogger(__name__)

FIRST_STEP = StepPlace()


class MegatronTrainer:
    """Model, optimizer and schedule of one rank.

    Every method except `close` and `rest` is collective: all ranks call it, in the same order. Use as a context manager
    or call `close`; a process can hold one trainer at a time.
    """

    def __init__(self, config: TrainerConfig, rank: int, world_size: int, init_method: str) -> None:
        """Join the other ranks at `init_method` ("tcp://host:port" or "file:///path") and build the model.

        The weights are random until `load_hf` or `load`. Raises `SettingsError`, `ModelError` or `TrainerError`.
        """
        self._config = config
        use_threads(self._config.num_threads)
        self._hf_checkpoint = Path(config.hf_checkpoint)
        self._hf_config = read_hf_config(self._hf_checkpoint)
        self._args = parse_megatron_args(config.megatron_argv, self._hf_config, config, rank, world_size)
        start_parallel(self._args, init_method, config.timeout_s)
        self.turns = DeviceTurns()
        """For other models of this process that share its device."""
        try:
            self._build()
        except BaseException:
            stop_parallel()
            raise

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the microbatches this rank trains on; ranks of one model replica share the number."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_parallel_size(self) -> int:
        return int(parallel_state.get_data_parallel_world_size())

    def load_hf(self) -> None:
        """Load the weights of the Hugging Face checkpoint; raises `ModelError` when they don't fit."""
        self._model.take_turn()
        hf_weights.load_hf_weights(self._learner.chunks, self._hf_checkpoint, self._hf_config)
        self._learner.optimizer.reload_model_params()

    def prepare(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> Sequence[Sequence[PackedMicrobatch]]:
        """This rank's microbatches of a rollout batch, step by step, with all that its objective needs of them.

        Call it before the first step: old log-probabilities are those of the weights at this moment. Adds
        `old_log_probs` where the ratio is taken against them, and `token_advantages` where the estimator needs them.
        Lazy microbatches stay lazy: they are read one after the other, and only what is added is kept. Where nothing
        is added, nothing is read.
        """
        use_threads(self._config.num_threads)
        self._model.take_turn()
        objective = self._config.objective
        prepared = steps
        if objective.recomputes_old_log_probs(len(steps)):
            self._config.hooks.computes_log_probs(self._args, self._learner.chunks, store_prefix="")
            prepared = [self._with_old_log_probs(step) for step in prepared]
        if objective.has_token_advantages:
            prepared = with_token_advantages(prepared, objective, sum_over_replicas)
        return prepared

    def train_step(
        self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals, place: StepPlace = FIRST_STEP
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's microbatches and return metrics of the whole step.

        Ranks of one data-parallel share pass the same microbatches; all ranks pass the same number of them. Returns,
        equal on all ranks: `METRIC_NAMES` and what else the objective reports, each aggregated like the loss except
        num_tokens (trained), grad_norm (before clipping) and lr (used in this step).
        Raises `TrainerError`, before any weight changes, when ranks disagree about the number of microbatches or a
        loss or gradient isn't finite.
        """
        use_threads(self._config.num_threads)
        step_loss = StepLoss(
            self._config.objective,
            totals,
            float(len(microbatches) * self.data_parallel_size),
            sum_over_context=sum_over_context(),
        )

        def run() -> None:
            hooks, learner = self._config.hooks, self._learner
            hooks.takes_step(self._args, place, learner.chunks, learner.optimizer, learner.scheduler)
            self._forward.run(microbatches, step_loss)

        metrics = self._model.train_step(len(microbatches), step_loss, run)
        _warn_of_free_routes(metrics)
        return {name: metrics[name] for name in sorted(metrics, key=_place_of_metric)}

    def log_probs(
        self, microbatches: Sequence[PackedMicrobatch], *, replay_nucleus: bool = True, replay_routes: bool = True
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens under the current weights, one array [R] per microbatch.

        Among the recorded nucleus where there is one, unless `replay_nucleus` is off; with the recorded experts where
        the settings replay them, unless `replay_routes` is off.
        """
        use_threads(self._config.num_threads)
        check_equal_counts(len(microbatches))
        self._model.evaluate_only()
        return self._forward.log_probs(microbatches, replay_nucleus=replay_nucleus, replay_routes=replay_routes)

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in a fixed order; rank 0 gets them, every rank has to iterate."""
        self._model.take_turn()
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
        return self._model.save(directory, iteration, write_tracker=write_tracker)

    def load(self, directory: Path, iteration: int) -> None:
        """Restore the state that `save` wrote; see `checkpoint.load_checkpoint`."""
        self._model.load(directory, iteration)

    def finish_batch(self) -> None:
        """Tell that the last step of a rollout batch has been taken."""
        self._model.finish_batch()

    def rest(self) -> int:
        """Move the memory of this model, and of those that share its turns, to the host until the next call.

        Returns the bytes of the device that were freed. What comes back is the same bit by bit.
        """
        return self.turns.rest()

    def _build(self) -> None:
        seed_everything(self._args)
        self._config.hooks.initialised(self._args)
        self._core_config = build_core_config(self._args, replay_routes=self._config.replay_routes)
        chunks = build_model(self._args, self._core_config, provider=self._config.hooks.model_provider)
        self._model = TrainedModel(chunks, self._args, self._core_config, self._config, self.turns)
        self.turns.join(self._model)
        self._learner = self._model.learner
        self._forward = ForwardPass(self._learner.chunks, self._args, self._core_config, self._config)

    def close(self) -> None:
        """Leave the other ranks; a second call does nothing."""
        stop_parallel()

    def __enter__(self) -> MegatronTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_old_log_probs(self, step: Sequence[PackedMicrobatch]) -> PreparedMicrobatches:
        return PreparedMicrobatches(step, [{"old_log_probs": values} for values in self.log_probs(step)])


def _warn_of_free_routes(metrics: Mapping[str, float]) -> None:
    replayed, needed = metrics.get("num_replayed_routes", 0.0), metrics.get("num_routes", 0.0)
    if replayed < needed and dist.get_rank() == 0:
        logger.warning("routes were replayed for %d of %d tokens; the others chose experts in turn", replayed, needed)


def _place_of_metric(name: str) -> int:
    """Those that are always reported come first, grad_norm and lr last."""
    order = [*METRIC_NAMES, *OPTIONAL_METRIC_NAMES, "", "grad_norm", "lr"]
    return order.index(name if name in order else "")
