"""Who gets which devices."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import at_least
from vime.settings.flag import flag


@dataclass(frozen=True)
class ClusterSettings:
    """Who gets which devices. Without CUDA one "GPU" is one worker process."""

    actor_num_nodes: int = flag(1, "Nodes that train.", check=at_least(1))
    actor_num_gpus_per_node: int = flag(8, "GPUs that train on each node.", check=at_least(1), common=True)
    rollout_num_gpus: int | None = flag(
        None,
        "GPUs that generate, in all: one engine's worth when left out, with --colocate as many as train; 0 starts no "
        "engine of vime's own.",
        check=at_least(0),
        common=True,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "Worker GPUs of one inference engine: tensor x data x pipeline x prefill-context size.", check=at_least(1)
    )
    num_gpus_per_node: int = flag(
        8, "GPUs that a node has for generation at most, without --colocate.", check=at_least(1)
    )
    colocate: bool = flag(False, "Train and generate on the same GPUs, in turn.")
    offload: bool = flag(False, "Both --offload-train and --offload-rollout.")
    offload_train: bool | None = flag(None, "Move the trainer out of the GPUs' memory while engines generate.")
    offload_rollout: bool | None = flag(None, "Put the engines to sleep while the trainer trains.")
    release_train: bool = flag(
        False, "End the trainer's processes during generation and start them from a checkpoint for each step."
    )

    @property
    def trainer_leaves_memory(self) -> bool:
        """Whether the trainer's memory is in the host while engines generate."""
        return self.offload or bool(self.offload_train) or (self.colocate and self.offload_train is None)

    @property
    def engines_leave_memory(self) -> bool:
        """Whether engines sleep while the trainer trains."""
        return self.offload or bool(self.offload_rollout) or (self.colocate and self.offload_rollout is None)

    @property
    def num_trainer_ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.num_trainer_ranks if self.colocate else self.rollout_num_gpus_per_engine

    @property
    def num_engines(self) -> int:
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine
