"""How vime calls the functions that flags name by import path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HookSignature:
    """How a hook is called: positional arguments by their documented names, then keyword arguments.

    `must_be_async` and `must_be_sync` say what vime does with the result; with neither, both work. `methods` are those
    of a class, which is then called with `positional`.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    must_be_async: bool = False
    must_be_sync: bool = False
    methods: tuple[str, ...] = ()

    def words(self, name: str) -> str:
        """As Python would declare it."""
        arguments = ", ".join([*self.positional, *(["*", *self.keywords] if self.keywords else [])])
        kind = "class " if self.methods else "async def " if self.must_be_async else "def "
        methods = f" with the methods {', '.join(self.methods)}" if self.methods else ""
        return f"{kind}{name}({arguments}){methods}"


_PER_SAMPLE = HookSignature(("args", "sample"))
_SAMPLES = HookSignature(("args", "samples"), must_be_sync=True)
_TIS_KEYWORDS = (
    *("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"),
    *("total_lengths", "response_lengths"),
)

HOOKS: dict[str, HookSignature] = {
    "rollout_function_path": HookSignature(("args", "rollout_id", "data_source"), ("evaluation",)),
    "eval_function_path": HookSignature(("args", "rollout_id", "data_source"), ("evaluation",)),
    "data_source_path": HookSignature(("args",), methods=("get_samples", "add_samples", "save", "load", "__len__")),
    "custom_generate_function_path": HookSignature(("args", "sample", "sampling_params"), must_be_async=True),
    "custom_rm_path": _PER_SAMPLE,
    "rollout_sample_hook_path": HookSignature(("args", "sample"), ("rollout_id", "evaluation")),
    "dynamic_sampling_filter_path": _SAMPLES,
    "buffer_filter_path": HookSignature(("args", "rollout_id", "buffer", "num_samples"), must_be_sync=True),
    "rollout_sample_filter_path": HookSignature(("args", "groups"), must_be_sync=True),
    "rollout_all_samples_process_path": HookSignature(("args", "groups", "data_source"), must_be_sync=True),
    "rollout_data_postprocess_path": HookSignature(("args", "rollout_id", "rollout_data"), must_be_sync=True),
    "custom_reward_post_process_path": _SAMPLES,
    "custom_convert_samples_to_train_data_path": _SAMPLES,
    "custom_advantage_function_path": HookSignature(("args", "rollout_data"), must_be_sync=True),
    "custom_loss_function_path": HookSignature(
        ("args", "batch", "log_probs", "entropies", "reduce"), must_be_sync=True
    ),
    "custom_tis_function_path": HookSignature((), _TIS_KEYWORDS, must_be_sync=True),
    "custom_pg_loss_reducer_function_path": HookSignature(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"), must_be_sync=True
    ),
    "custom_rollout_log_function_path": HookSignature(
        ("rollout_id", "args", "samples", "extra_metrics", "time"), must_be_sync=True
    ),
    "custom_eval_rollout_log_function_path": HookSignature(
        ("rollout_id", "args", "data", "extra_metrics"), must_be_sync=True
    ),
    "custom_megatron_init_path": HookSignature(("args",), must_be_sync=True),
    "custom_megatron_before_log_prob_hook_path": HookSignature(("args", "model", "store_prefix"), must_be_sync=True),
    "custom_megatron_before_train_step_hook_path": HookSignature(
        ("args", "rollout_id", "step_id", "model", "optimizer", "scheduler"), must_be_sync=True
    ),
    "custom_update_weight_post_write_path": HookSignature(("args", "version_dir", "engines"), must_be_sync=True),
    "vllm_custom_pull_weights_pre_read_hook": HookSignature(("source_dir", "target_version"), must_be_sync=True),
    "custom_model_provider_path": HookSignature(("pre_process", "post_process"), ("vp_stage",), must_be_sync=True),
}
"""Field of the settings -> how vime calls the function there."""
