"""What one trainer rank needs to know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.backends.megatron_utils.trainer_hooks import TrainerHooks
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of `MegatronTrainer`; everything that Megatron itself understands goes through `megatron_argv`."""

    hf_checkpoint: Path | str
    """Folder with `config.json` and safetensors files."""
    model_name: str | None = None
    """Family that its weights are of, where `config.json` names another type; see `families.family_named`."""
    megatron_argv: Sequence[str] = ()
    """Megatron flags of the user, such as `("--tensor-model-parallel-size", "2")`; they win over derived ones."""
    megatron_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of Megatron's arguments by attribute name, set over all flags (`--megatron-config-path`)."""
    extra_args_provider_path: str | None = None
    """Import path of a function that adds flags to Megatron's parser; they go through `megatron_argv` too."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters and activations; the optimizer always keeps float32."""
    num_further: int = 0
    """Layers that predict further tokens, of those that the checkpoint has."""
    further_scale: float = 0.2
    """Weight of their loss."""
    global_batch_size: int = 1
    """Rollouts per optimizer step."""
    train_iters: int | None = None
    """Planned optimizer steps; needed only by learning-rate schedules that decay and set no end of their own."""
    lr: float = 1e-6
    lr_decay_style: str = "constant"
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    only_train_params: tuple[str, ...] | None = None
    """Regular expressions of the parameters that are trained; None for all. See `TrainedParameters`."""
    freeze_params: tuple[str, ...] | None = None
    """Regular expressions of those that aren't."""
    stateless_adam: bool = False
    """Adam without moments."""
    saves_optimizer: bool = True
    """Checkpoints hold the optimizer's state; without it, whoever goes on from one begins with a new optimizer."""
    reset_optimizer_states: bool = False
    """Forget the optimizer's state after each rollout batch."""
    padded_vocab_size: int | None = None
    """Rows of embedding and head; None takes the vocabulary, rounded up to the tensor-parallel size."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    seed: int = 1234
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    hooks: TrainerHooks = field(default_factory=TrainerHooks)
    temperature: float = 1.0
    """Sampling temperature of the rollouts; logits are divided by it."""
    fp32_lm_head: bool = True
    """Multiply hidden states and head weights in float32 even when the model is bf16."""
    log_probs_chunk_size: int = 2048
    """Rows of float32 logits that exist at once."""
    replay_routes: bool = False
    """Let recorded experts be chosen in training: the sampler's, in old log-probabilities too."""
    record_routes: bool = False
    """With `replay_routes`: replay not the sampler's experts but those that the trainer chooses before the first step
    of a rollout batch, which a forward pass records."""
    start: WeightSource | None = None
    """Where the actor of a new run starts; None: as the reference where there is one, else from `hf_checkpoint`."""
    reference: WeightSource | None = None
    """What the KL of the actor is measured against, and where it starts without a `start` of its own."""
    reference_update_interval: int | None = None
    """The actor becomes the reference after every so many rollout batches; None keeps the first one."""
    teacher: WeightSource | None = None
    """Model of the same shape that the actor distils from."""
    log_probs_max_tokens: int | None = None
    """Most tokens of a pass without gradients, in which microbatches then go together; None keeps them apart."""
    distributed_backend: str = "nccl"
    """Between ranks on GPUs; without them it is gloo."""
    num_threads: int | None = None
    """Threads of torch on the CPU; None leaves torch's choice."""
    timeout_s: float = 600.0
    """How long a collective may wait for the other ranks."""

    def __post_init__(self) -> None:
        positive = ("global_batch_size", "lr", "temperature", "log_probs_chunk_size", "timeout_s", "seed")
        values: dict[str, float] = {name: self.__dict__[name] for name in positive}
        for name, value in values.items():
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{name} is {value}, allowed: a finite number above 0.")
        if self.record_routes and not self.replay_routes:
            raise SettingsError("record_routes is true without replay_routes, allowed: both.")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Settings of `vime.backends.megatron_utils.critic.Critic`."""

    trainer: TrainerConfig
    """Its model, optimizer, gamma, lambda and aggregation; flags of the parallel layout are those of the actor."""
    value_clip: float
    load: Path | None = None
    """First weights: a Hugging Face folder, or a checkpoint of Megatron's; None takes `trainer.hf_checkpoint`."""
    save: Path | None = None
    """Where each checkpoint is written a second time, as a folder that `load` takes."""

    @property
    def returns(self) -> ObjectiveConfig:
        """How its targets are computed: from rewards and its own values alone.

        The actor's KL penalty, teacher, whitening and own advantage function change what the actor is told, not what
        the critic predicts.
        """
        return dataclasses.replace(
            self.trainer.objective,
            estimator=Estimator.PPO,
            kl_coef=0.0,
            opd_kl_coef=None,
            custom_advantages=None,
            normalize_advantages=False,
        )
