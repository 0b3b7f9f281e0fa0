"""The critic of ppo on one rank: a value model in the process and the parallel layout of the actor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core import parallel_state

from vime.algorithms.value_objective import MOMENTS, explained_variance
from vime.backends.megatron_utils import checkpoint
from vime.backends.megatron_utils.advantages import with_token_advantages
from vime.backends.megatron_utils.arguments import parse_megatron_args
from vime.backends.megatron_utils.background_save import BackgroundSave
from vime.backends.megatron_utils.config import CriticConfig
from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.initial_values import load_initial_weights
from vime.backends.megatron_utils.model import build_core_config, build_model
from vime.backends.megatron_utils.parallel import current_args, use_threads
from vime.backends.megatron_utils.trained_model import TrainedModel, check_equal_counts, sum_over_replicas
from vime.backends.megatron_utils.value_pass import ValueLoss, ValuePass
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import PreparedMicrobatches, without_candidates
from vime.errors import RestoreError

FOLDER = "critic"
"""In the folder of the actor's checkpoint, so that one commit holds both."""

METRIC_NAMES = ("value_loss", "value_clipfrac", "value_explained_variance", "critic_grad_norm", "critic_lr")


class Critic:
    """Predicts the return of every state and learns from the returns that were observed.

    Every method is collective. A `MegatronTrainer` has to be there first, since both use its process groups.
    """

    def __init__(self, config: CriticConfig, rank: int, world_size: int, turns: DeviceTurns) -> None:
        """Build the model, which shares the actor's `turns` on the device; weights are random until `start` or `load`.

        Raises as `MegatronTrainer`.
        """
        self._config = config
        trainer = config.trainer
        use_threads(trainer.num_threads)
        self._hf_config = read_hf_config(Path(trainer.hf_checkpoint), trainer.model_name)
        args = parse_megatron_args(trainer.megatron_argv, self._hf_config, trainer, rank, world_size)
        turns.rest()
        with current_args(args):
            core_config = build_core_config(args, replay_routes=False)
            chunks = build_model(args, core_config, provider=trainer.hooks.model_provider, value_head=True)
            self._model = TrainedModel(chunks, args, core_config, trainer, turns)
        turns.join(self._model)
        self._pass = ValuePass(self._model.learner.chunks, args, core_config)

    def start(self) -> None:
        """Load the first weights; the value head stays at zero where they have none. Raises `ModelError`."""
        self._model.take_turn()
        given = self._config.load
        trainer = self._config.trainer
        beside_actor = trainer.start or trainer.reference
        hugging_face = Path(trainer.hf_checkpoint)
        source = given or (hugging_face if beside_actor is None else beside_actor.folder)
        load_initial_weights(self._model.learner, source, self._hf_config)

    def with_values(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> list[PreparedMicrobatches]:
        """The same microbatches with `values` under the weights of this moment, for actor and critic.

        Lazy microbatches stay lazy, as with `MegatronTrainer.prepare`.
        """
        use_threads(self._config.trainer.num_threads)
        prepared = []
        for step in steps:
            check_equal_counts(len(step))
            self._model.evaluate_only()
            found = self._pass.values(without_candidates(step))
            prepared.append(PreparedMicrobatches(step, [{"values": values} for values in found]))
        return prepared

    def with_returns(self, steps: Sequence[Sequence[PackedMicrobatch]]) -> list[PreparedMicrobatches]:
        """Microbatches of `with_values`, without candidates, with the `token_returns` that the critic learns."""
        return with_token_advantages(
            [without_candidates(step) for step in steps], self._config.returns, sum_over_replicas
        )

    def train_step(self, microbatches: Sequence[PackedMicrobatch], totals: StepTotals) -> dict[str, float]:
        """Take one optimizer step on microbatches of `with_returns`; `METRIC_NAMES` of the whole step, on all ranks.

        value_loss and value_clipfrac are aggregated like the loss of the actor; value_explained_variance compares the
        values from before the batch with the returns, over trained tokens. Raises as `MegatronTrainer.train_step`.
        """
        trainer = self._config.trainer
        use_threads(trainer.num_threads)
        loss = ValueLoss(
            totals,
            self._config.value_clip,
            trainer.objective.calculate_per_token_loss,
            float(len(microbatches) * parallel_state.get_data_parallel_world_size()),
        )
        found = self._model.train_step(len(microbatches), loss, lambda: self._pass.run(microbatches, loss))
        return {
            "value_loss": found["loss"],
            "value_clipfrac": found["value_clipfrac"],
            "value_explained_variance": explained_variance({name: found[name] for name in MOMENTS}),
            "critic_grad_norm": found["grad_norm"],
            "critic_lr": found["lr"],
        }

    def parameter_digests(self) -> dict[str, str]:
        """See `TrainedModel.parameter_digests`."""
        return self._model.parameter_digests()

    def save(self, directory: Path, iteration: int, *, background: BackgroundSave | None = None) -> None:
        """Write into the folder of the actor's checkpoint of `iteration`, and to `CriticConfig.save` where given."""
        folder = checkpoint.checkpoint_folder(directory, iteration) / FOLDER
        self._model.save_into(folder, iteration, background=background)
        if self._config.save is not None:
            self._model.save(self._config.save, iteration, write_tracker=True, background=background)

    def load(self, directory: Path, iteration: int) -> None:
        """Restore what `save` wrote beside the actor. Raises `RestoreError` when that checkpoint has no critic."""
        folder = checkpoint.checkpoint_folder(directory, iteration) / FOLDER
        if not folder.is_dir():
            raise RestoreError(
                f"{folder} is absent: the checkpoint was saved by a run without a critic.",
                next_step="Start a new run from its weights, or resume with the --advantage-estimator that it had.",
            )
        self._model.load_from(folder)

    def finish_batch(self) -> None:
        """Tell that the last step of a rollout batch has been taken."""
        self._model.finish_batch()
