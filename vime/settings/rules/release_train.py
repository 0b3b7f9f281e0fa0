"""Rules on --release-train: the trainer's processes end during generation and start from a checkpoint for each step."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem


def released_trainer_publishes_through_disk(settings: Settings) -> Iterator[Problem]:
    """Processes that come and go can't keep a collective with the engines open, nor the version before in memory."""
    weights = settings.weights
    through_disk = (weights.update_weight_mode, weights.update_weight_transport) == ("full", "disk")
    if settings.cluster.release_train and not through_disk:
        yield problem(
            settings,
            "--release-train --update-weight-mode --update-weight-transport",
            allowed="--update-weight-mode full with --update-weight-transport disk",
            reason="Collectives and deltas need processes that stay; the trainer's end after each publication.",
            next_step="Give --update-weight-transport disk and --update-weight-disk-dir DIR, without deltas.",
        )


def released_trainer_saves_each_batch(settings: Settings) -> Iterator[Problem]:
    """The next start continues from the newest checkpoint, so a batch without one would be lost."""
    if settings.cluster.release_train and settings.checkpoint.save_interval not in (None, 1):
        yield problem(
            settings,
            "--release-train --save-interval",
            allowed="--save-interval 1, or left out",
            reason="The trainer starts again from the checkpoint of the batch before.",
            next_step="Leave out --save-interval.",
        )


def released_trainer_is_not_offloaded(settings: Settings) -> Iterator[Problem]:
    """A trainer that has ended has nothing to move; the reference ignores the switch."""
    cluster = settings.cluster
    if cluster.release_train and (cluster.offload_train or cluster.offload):
        name = "--offload-train" if cluster.offload_train else "--offload"
        yield problem(
            settings,
            f"--release-train {name}",
            allowed="one of them",
            reason="A trainer that has ended has nothing to move out of memory.",
            next_step=f"Leave out {name}.",
        )


def colocated_engines_sleep_for_a_released_trainer(settings: Settings) -> Iterator[Problem]:
    """The trainer starts on the engines' GPUs, so they must have freed them; the reference overrides the user's no."""
    cluster = settings.cluster
    if cluster.release_train and cluster.colocate and cluster.offload_rollout is False:
        yield problem(
            settings,
            "--release-train --colocate --offload-rollout",
            allowed="--offload-rollout, or left out",
            reason="The trainer needs the memory that the engines hold.",
            next_step="Leave out --no-offload-rollout.",
        )


RULES = (
    released_trainer_publishes_through_disk,
    released_trainer_saves_each_batch,
    released_trainer_is_not_offloaded,
    colocated_engines_sleep_for_a_released_trainer,
)
