"""One rank of the trainer; knows nothing of Ray, queues or recovery."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vime.backends.megatron_utils.arguments import parse_megatron_args
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.megatron_utils.shim import prepare_megatron
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.data.batch import PackedMicrobatch, RouteRows, StepTotals
from vime.data.lazy import token_counts
from vime.data.merged import MergedMicrobatches
from vime.data.trained_tokens import TrainedTokens

prepare_megatron()

from megatron.core import parallel_state  # noqa: E402

from vime.backends.megatron_utils import checkpoint, hf_export, hf_weights  # noqa: E402
from vime.backends.megatron_utils.background_save import BackgroundSave  # noqa: E402
from vime.backends.megatron_utils.checkpoint_weights import load_source  # noqa: E402
from vime.backends.megatron_utils.frozen_models import FrozenModels  # noqa: E402
from vime.backends.megatron_utils.frozen_weights import FrozenWeights  # noqa: E402
from vime.backends.megatron_utils.loss import (  # noqa: E402
    METRIC_NAMES,
    OPTIONAL_METRIC_NAMES,
    StepLoss,
    with_replayed_fraction,
)
from vime.backends.megatron_utils.model import build_core_config, build_model  # noqa: E402
from vime.backends.megatron_utils.numeric_layout import numeric_layout  # noqa: E402
from vime.backends.megatron_utils.parallel import (  # noqa: E402
    is_sample_source,
    on_all_ranks,
    seed_everything,
    start_parallel,
    stop_parallel,
    sum_over_context,
    use_threads,
)
from vime.backends.megatron_utils.preparation import prepared_steps  # noqa: E402
from vime.backends.megatron_utils.probe_scores import probe_scores  # noqa: E402
from vime.backends.megatron_utils.schedule import ForwardPass  # noqa: E402
from vime.backends.megatron_utils.trained_model import (  # noqa: E402
    TrainedModel,
    check_equal_counts,
    sum_over_replicas,
)

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
        self._hf_config = read_hf_config(self._hf_checkpoint, config.model_name)
        self._args = parse_megatron_args(config.megatron_argv, self._hf_config, config, rank, world_size)
        start_parallel(self._args, init_method, config.timeout_s)
        self.turns = DeviceTurns()
        """For other models of this process that share its device."""
        self.sample_losses: dict[int, float] = {}
        """Of the last step; see `StepLoss.sample_losses`."""
        self.trained_tokens: dict[int, TrainedTokens] = {}
        """`Sample.index` -> its tokens in the last step, on one of the ranks that share the sample."""
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

    @property
    def megatron_args(self) -> argparse.Namespace:
        """Megatron's own arguments, validated."""
        return self._args

    @property
    def layout(self) -> dict[str, str | int]:
        """What the last bits of a step depend on besides weights, samples and settings."""
        return numeric_layout(self._args, self._config.num_threads)

    def parameter_digests(self) -> dict[str, str]:
        """See `TrainedModel.parameter_digests`."""
        return self._model.parameter_digests()

    @property
    def route_part(self) -> RoutePart | None:
        """Which of the sampler's routes this rank replays; None where it replays none of them."""
        return None if self._config.record_routes else self._forward.route_part

    def load_hf(self) -> None:
        """Load the weights of the Hugging Face checkpoint; raises `ModelError` when they don't fit."""
        self.load_weights(WeightSource("--hf-checkpoint", self._hf_checkpoint))

    def load_weights(self, source: WeightSource) -> None:
        """Load weights alone; see `checkpoint_weights.load_source`."""
        self._model.take_turn()
        load_source(self._learner.chunks, self._hf_config, source)
        self._learner.optimizer.reload_model_params()

    def load_start(self) -> None:
        """Load what a new run starts from: weights of its own, the reference or the Hugging Face checkpoint.

        Loads the frozen models too.

        Raises `ModelError`, `RestoreError` or `SettingsError` when weights are absent or don't fit.
        """
        self._model.take_turn()
        start = self._config.start
        if start is None and self._config.reference is None:
            start = WeightSource("--hf-checkpoint", self._hf_checkpoint)
        self._frozen.load_start()
        if start is not None:
            self.load_weights(start)

    def prepare(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> Sequence[Sequence[PackedMicrobatch]]:
        """This rank's microbatches of a rollout batch, step by step, with all that its objective needs of them.

        Call it before the first step: old log-probabilities are those of the weights at this moment. Adds
        `reference_log_probs` and `teacher_log_probs` of the frozen models, `old_log_probs` where the ratio is taken
        against them, `token_advantages` where the estimator needs them, and `routes` where the trainer's own experts
        are replayed: those that it chooses at this moment.
        Lazy microbatches stay lazy: they are read one after the other, and only what is added is kept. Where nothing
        is added, nothing is read.
        """
        use_threads(self._config.num_threads)
        self._model.take_turn()
        return prepared_steps(
            steps,
            self._config.objective,
            self._frozen,
            self._scores,
            sum_over_replicas,
            before=self._computes_log_probs,
            record=self._recorded_scores if self._config.record_routes else None,
        )

    def rollout_trained(self, rollout_id: int) -> None:
        """Call it after the last step of each rollout batch: the reference may follow the actor."""
        self._model.finish_batch()
        self._frozen.rollout_trained(rollout_id)

    def train_step(
        self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals, place: StepPlace = FIRST_STEP
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's microbatches and return metrics of the whole step.

        Ranks of one data-parallel share pass the same microbatches; all ranks pass the same number of them. Returns,
        equal on all ranks: what the objective reports, `METRIC_NAMES` first, each aggregated like the loss except
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
            further_scale=self._config.further_scale,
        )

        def run() -> None:
            hooks, learner = self._config.hooks, self._learner
            hooks.takes_step(self._args, place, learner.chunks, learner.optimizer, learner.scheduler)
            self._forward.run(microbatches, step_loss)

        metrics = with_replayed_fraction(self._model.train_step(len(microbatches), step_loss, run))
        self.sample_losses = step_loss.sample_losses
        self.trained_tokens = step_loss.tokens.by_sample() if is_sample_source() else {}
        return {name: metrics[name] for name in sorted(metrics, key=_place_of_metric)}

    def log_probs(
        self, microbatches: Sequence[PackedMicrobatch], *, replay_nucleus: bool = True, replay_routes: bool = True
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens under the current weights, one array [R] per microbatch.

        Among the recorded nucleus where there is one, unless `replay_nucleus` is off; with the recorded experts where
        the settings replay them, unless `replay_routes` is off.
        """
        scores = self._scores(microbatches, replay_nucleus=replay_nucleus, replay_routes=replay_routes)
        return [log_probs for (log_probs,) in scores]

    def probe(self, microbatches: Sequence[PackedMicrobatch]) -> dict[str, npt.NDArray[np.float32]]:
        """The response tokens of all `microbatches` scored in each way of `probe_scores`, [R] by its name."""
        self._begin_scoring(microbatches)
        return probe_scores(self._forward, microbatches)

    def probe_start_weights(self, microbatches: Sequence[PackedMicrobatch]) -> npt.NDArray[np.float32]:
        """The response tokens [R] scored under the Hugging Face checkpoint's weights; the trainer keeps its own.

        Raises `ModelError` as `load_hf`.
        """
        self._begin_scoring(microbatches)
        with FrozenWeights(self._learner.chunks).in_place():
            load_source(self._learner.chunks, self._hf_config, WeightSource("--hf-checkpoint", self._hf_checkpoint))
            return np.concatenate([log_probs for (log_probs,) in self._forward.scores(microbatches)])

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in a fixed order; rank 0 gets them, every rank has to iterate.

        Layers for further tokens are left out: engines don't have them.
        """
        self._model.take_turn()
        return hf_weights.iterate_hf_weights(self._learner.chunks, self._hf_config)

    def _all_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `named_hf_weights`, with the layers for further tokens."""
        self._model.take_turn()
        chunks = self._learner.chunks
        further = hf_weights.num_further_layers(chunks)
        return hf_weights.iterate_hf_weights(chunks, self._hf_config, num_further=further)

    def save_hf(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, with configuration and tokenizer of the original.

        The folder is there whole or not at all; one that an earlier call wrote is replaced. Raises `SettingsError`
        for any other folder in its place, and `DiskFullError`.
        """
        if dist.get_rank() == 0:
            hf_export.write(self._all_hf_weights(), self._hf_checkpoint, directory)
        else:
            for _ in self._all_hf_weights():
                pass
        dist.barrier()

    def save(
        self,
        directory: Path,
        iteration: int,
        *,
        write_tracker: bool = False,
        background: BackgroundSave | None = None,
    ) -> Path:
        """Write `<directory>/iter_<iteration>` and return it; see `checkpoint.save_checkpoint`."""
        folder = self._model.save(directory, iteration, write_tracker=write_tracker, background=background)
        self._frozen.save(folder, background=background)
        return folder

    def load(self, directory: Path, iteration: int) -> None:
        """Restore the state that `save` wrote, and the frozen models; see `checkpoint.load_checkpoint`."""
        self._model.load(directory, iteration)
        self._frozen.load(checkpoint.checkpoint_folder(directory, iteration))

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
        self._frozen = FrozenModels(self._learner, self._args, self._hf_config, self._config)

    def _computes_log_probs(self, store_prefix: str) -> None:
        self._config.hooks.computes_log_probs(self._args, self._learner.chunks, store_prefix)

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
        self._begin_scoring(microbatches)
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
        longest: int = max(on_all_ranks(max(token_counts(microbatches))))
        return max(1, most // longest)

    def _recorded_scores(
        self, microbatches: Sequence[PackedMicrobatch], *, with_entropy: bool = False
    ) -> tuple[list[npt.NDArray[np.float32]], list[RouteRows]]:
        """See `RecordedScore`."""
        self._begin_scoring(microbatches)
        return self._forward.scores_and_routes(microbatches, with_entropy=with_entropy)

    def _begin_scoring(self, microbatches: Sequence[PackedMicrobatch]) -> None:
        use_threads(self._config.num_threads)
        check_equal_counts(len(microbatches))
        self._model.evaluate_only()


def _place_of_metric(name: str) -> int:
    """Those that are always reported come first, grad_norm and lr last."""
    order = [*METRIC_NAMES, *OPTIONAL_METRIC_NAMES, "", "grad_norm", "lr"]
    return order.index(name if name in order else "")
