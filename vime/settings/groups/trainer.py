"""Optimizer, batching and extension points of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.settings.checks import at_least, dotted_path, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class TrainerSettings:
    """Optimizer and batching. Every flag that isn't vime's is passed on to Megatron."""

    train_backend: str = flag("megatron", "Training framework.", choices=("megatron",))
    lr: float = flag(1e-6, "Learning rate.", check=at_least(0), common=True)
    clip_grad: float = flag(1.0, "Largest gradient norm.", check=at_least(0))
    seed: int = flag(1234, "Seed of the trainer and, plus its number, of each engine.")
    micro_batch_size: int = flag(1, "Samples in a microbatch, unless batches are dynamic.", check=at_least(1))
    use_dynamic_batch_size: bool = flag(False, "Fill microbatches up to --max-tokens-per-gpu.")
    max_tokens_per_gpu: int | None = flag(
        None, "Most tokens of a microbatch on one GPU; a sample that needs more stops the run.", check=at_least(1)
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "Most tokens of a microbatch in passes without gradients; --max-tokens-per-gpu when left out.",
        check=at_least(1),
    )
    balance_data: bool = flag(False, "Share sequences out among data-parallel ranks so that each gets as many tokens.")
    balance_by_flops: bool = flag(False, "Balance estimated work, c L + L^2 for L tokens, instead of tokens.")
    trainer_num_threads: int | None = flag(
        None,
        "CPU threads of one trainer rank; the cores divided by ranks and engines when left out.",
        check=at_least(1),
    )
    use_stateless_adam: bool = flag(False, "Adam that keeps no moments between steps.")
    reset_optimizer_states: bool = flag(False, "Clear the optimizer's state after each rollout batch.")
    only_train_params_name_list: tuple[str, ...] | None = flag(
        None, "Regular expressions of the parameters to train; all others are frozen."
    )
    freeze_params_name_list: tuple[str, ...] | None = flag(None, "Regular expressions of the parameters to freeze.")
    megatron_config_path: str | None = flag(
        None, "YAML file with Megatron overrides for actor and critic.", check=place
    )
    train_env_vars: dict[str, Any] = flag({}, "Environment variables of the trainer's processes.")
    distributed_backend: str = flag(
        "nccl", "Backend of torch.distributed; without CUDA it is gloo all the same.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "Minutes that a rank waits for the others in a collective.", check=at_least(1)
    )
    padded_vocab_size: int | None = flag(
        None, "Rows of the embedding; the model's own when left out.", check=at_least(1)
    )
    mtp_num_layers: int | None = flag(
        None, "Layers of multi-token prediction that are trained, of those that the checkpoint has.", check=at_least(1)
    )
    mtp_loss_scaling_factor: float = flag(0.2, "Weight of the multi-token prediction loss.", check=at_least(0))
    extra_args_provider_path: str | None = flag(
        None,
        "Import path of `f(parser)` that adds flags of your own to Megatron's; `train.py` sets it from pretrain_gpt.",
        check=dotted_path,
    )
    custom_model_provider_path: str | None = flag(
        None, "Import path of `f(pre_process, post_process, vp_stage=None)` that builds the model.", check=dotted_path
    )
    custom_megatron_init_path: str | None = flag(
        None, "Import path of `f(args)` that runs after Megatron's initialisation.", check=dotted_path
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None,
        "Import path of `f(args, model, store_prefix)` that runs before log-probabilities are computed.",
        check=dotted_path,
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "Import path of `f(args, rollout_id, step_id, model, optimizer, scheduler)` that runs before each step.",
        check=dotted_path,
    )
