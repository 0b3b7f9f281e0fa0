"""The settings tree: one frozen dataclass a group, one field a documented flag."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.flag import above, at_least, flag


@dataclass(frozen=True)
class ClusterSettings:
    """Who gets which devices. Without CUDA one "GPU" is one worker process."""

    actor_num_nodes: int = flag(1, "Nodes that train.", check=at_least(1))
    actor_num_gpus_per_node: int = flag(8, "GPUs that train on each node.", check=at_least(1))
    rollout_num_gpus: int | None = flag(
        None, "GPUs that generate, in all; one engine's worth when left out.", check=at_least(0)
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one inference engine.", check=at_least(1))

    @property
    def num_trainer_ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        return self.rollout_num_gpus_per_engine if self.rollout_num_gpus is None else self.rollout_num_gpus

    @property
    def num_engines(self) -> int:
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine


@dataclass(frozen=True)
class DataSettings:
    """Prompts and batch sizes."""

    prompt_data: str | None = flag(
        None, "Prompts: a .jsonl or .parquet file or fsspec URL, `path@[start:end]` for rows."
    )
    input_key: str = flag("input", "Field of a record that holds the prompt.")
    label_key: str | None = flag(None, "Field of a record that holds the label.")
    metadata_key: str = flag("metadata", "Field of a record that holds metadata.")
    apply_chat_template: bool = flag(False, "Render the prompt through the tokenizer's chat template.")
    rollout_shuffle: bool = flag(False, "Shuffle the prompts anew each epoch.")
    rollout_seed: int = flag(42, "Seed of the prompt order; epoch e uses seed + e.")
    num_rollout: int | None = flag(None, "Rollout batches to train in all, resumed ones included.", check=at_least(1))
    rollout_batch_size: int | None = flag(None, "Prompt groups in one rollout batch.", check=at_least(1))
    n_samples_per_prompt: int = flag(1, "Samples generated for each prompt.", check=at_least(1))
    global_batch_size: int | None = flag(
        None, "Samples in one optimizer step; the whole rollout batch when left out.", check=at_least(1)
    )

    @property
    def samples_per_rollout(self) -> int:
        return (self.rollout_batch_size or 0) * self.n_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        return self.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        return self.samples_per_rollout // self.samples_per_step


@dataclass(frozen=True)
class RolloutSettings:
    """How a sample is generated and rewarded."""

    rollout_max_response_len: int | None = flag(None, "Most tokens of one response.", check=at_least(1))
    rollout_temperature: float = flag(
        1.0, "Sampling temperature; the trainer divides its logits by it.", check=above(0)
    )
    rollout_top_p: float = flag(1.0, "Nucleus sampling mass.", check=above(0))
    rollout_top_k: int = flag(-1, "Sample among the k most probable tokens; -1 for all.")
    rm_type: str | None = flag(None, "Built-in reward.")
    custom_rm_path: str | None = flag(
        None, "Dotted path of your reward: `async def f(args, sample) -> float`; wins over --rm-type."
    )
    reward_key: str | None = flag(None, "Key of the reward to train on, when the reward is a dict.")
    reward_timeout: float = flag(600.0, "Seconds after which a reward call counts as failed.", check=above(0))
    vllm_server_concurrency: int = flag(64, "Requests in flight at one engine.", check=at_least(1))
    rollout_max_attempts: int = flag(3, "Failed generations of one group before it is set aside.", check=at_least(1))
    rollout_max_failed_fraction: float = flag(
        0.2, "The run stops when a larger fraction of the groups was set aside.", check=at_least(0)
    )


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the optimizer minimises."""

    advantage_estimator: str = flag(
        "grpo",
        "How advantages come from rewards.",
        choices=("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    )
    eps_clip: float = flag(0.2, "Lower clip range of the importance ratio.", check=at_least(0))
    eps_clip_high: float | None = flag(None, "Upper clip range; --eps-clip when left out.", check=at_least(0))
    eps_clip_c: float | None = flag(None, "Dual clip: bound of the loss for negative advantages.", check=above(1))
    use_rollout_logprobs: bool = flag(False, "Take the sampler's log-probabilities as those of the old policy.")
    calculate_per_token_loss: bool = flag(False, "Mean over tokens instead of mean over samples.")
    grpo_std_normalization: bool = flag(
        True, "Don't divide by the group's standard deviation.", name="--disable-grpo-std-normalization", inverted=True
    )
    rewards_normalization: bool = flag(
        True, "Use raw rewards as advantages.", name="--disable-rewards-normalization", inverted=True
    )


@dataclass(frozen=True)
class TrainerSettings:
    """Optimizer and batching; every other Megatron flag is passed on to Megatron."""

    lr: float = flag(1e-6, "Learning rate.", check=at_least(0))
    clip_grad: float = flag(1.0, "Largest gradient norm.", check=at_least(0))
    seed: int = flag(1234, "Seed of the trainer and, plus its number, of each engine.")
    micro_batch_size: int = flag(1, "Samples in a microbatch, unless batches are dynamic.", check=at_least(1))
    use_dynamic_batch_size: bool = flag(False, "Fill microbatches up to --max-tokens-per-gpu.")
    max_tokens_per_gpu: int | None = flag(None, "Most tokens of a microbatch.", check=at_least(1))
    trainer_num_threads: int | None = flag(
        None,
        "CPU threads of one trainer rank; the cores divided by ranks and engines when left out.",
        check=at_least(1),
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """Where the model comes from and where the run is kept."""

    hf_checkpoint: str | None = flag(None, "Hugging Face folder: tokenizer, config and initial weights.")
    load: str | None = flag(None, "Run to resume: its --save folder or one `committed_N.json`.")
    save: str | None = flag(None, "Run folder: checkpoints, queue, logs and metrics.")
    save_interval: int | None = flag(None, "Commit after every N rollout batches.", check=at_least(1))
    ckpt_step: int | None = flag(
        None, "Resume from the commit of this rollout instead of the newest.", check=at_least(0)
    )


@dataclass(frozen=True)
class QueueSettings:
    """The durable queue between generation and training."""

    rollout_data_transport: str = flag(
        "object-store", "How samples travel to the trainer.", choices=("straw", "object-store", "nixl")
    )
    rollout_data_dir: str | None = flag(None, "Folder of the queue, on a file system that all nodes share.")
    rollout_storage_profile: str = flag("local", "Kind of file system under the queue.", choices=("local", "juicefs"))
    rollout_storage_declaration: str | None = flag(None, "JSON file that declares the JuiceFS mount's options.")
    rollout_queue_run_id: str = flag("rollout", "Name of the run inside the pool.")
    rollout_queue_lease_seconds: float = flag(
        300.0, "Seconds without a heartbeat after which a group is handed out again.", check=above(0)
    )
    rollout_queue_max_groups: int | None = flag(
        None,
        "Most groups generated but not trained, in-flight ones included; twice the rollout batch when left out.",
        check=at_least(1),
    )


@dataclass(frozen=True)
class WeightSettings:
    """How new weights reach running engines."""

    flush_cache_interval: int = flag(
        1, "1: flush KV at every publication; N: at every Nth; 0 or less: keep KV and running requests."
    )
    prefix_cache_salt: str = flag(
        "version", "Key of the prefix cache: the policy version, or none.", choices=("version", "none")
    )
    update_weight_timeout: float = flag(300.0, "Seconds after which a publication counts as failed.", check=above(0))


@dataclass(frozen=True)
class Settings:
    """Everything a run is started with."""

    cluster: ClusterSettings
    data: DataSettings
    rollout: RolloutSettings
    objective: ObjectiveSettings
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    queue: QueueSettings
    weights: WeightSettings
    vllm_args: tuple[str, ...] = ()
    """`--vllm-*` flags as given."""
    megatron_args: tuple[str, ...] = ()
    """Flags that are neither vime's nor vLLM's, as given."""


GROUPS: dict[str, type] = {
    "checkpoint": CheckpointSettings,
    "data": DataSettings,
    "cluster": ClusterSettings,
    "rollout": RolloutSettings,
    "objective": ObjectiveSettings,
    "trainer": TrainerSettings,
    "weights": WeightSettings,
    "queue": QueueSettings,
}
