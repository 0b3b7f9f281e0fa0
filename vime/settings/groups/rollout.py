"""How a sample is generated, filtered and rewarded."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, above_up_to, all_or_at_least, at_least, between, dotted_path
from vime.settings.flag import flag


@dataclass(frozen=True)
class RolloutSettings:
    """How a sample is generated, filtered and rewarded."""

    rollout_function_path: str = flag(
        "vime.rollout.vllm_rollout.generate_rollout",
        "Import path of `generate_rollout(args, rollout_id, data_source, evaluation=False)`.",
        check=dotted_path,
    )
    custom_generate_function_path: str | None = flag(
        None,
        "Import path of `async def f(args, sample, sampling_params)` that generates one sample.",
        check=dotted_path,
    )
    rollout_max_context_len: int | None = flag(None, "Most tokens of prompt and response together.", check=at_least(1))
    rollout_max_response_len: int | None = flag(None, "Most tokens of one response.", check=at_least(1), common=True)
    rollout_temperature: float = flag(
        1.0, "Sampling temperature; the trainer divides its logits by it.", check=above(0)
    )
    rollout_top_p: float = flag(
        1.0, "Nucleus sampling mass; below 1 the trainer replays each token's nucleus.", check=above_up_to(0, 1)
    )
    rollout_top_k: int = flag(-1, "Sample among the k most probable tokens; -1 for all.", check=all_or_at_least(1))
    rollout_stop: tuple[str, ...] | None = flag(None, "Texts that end a response; they stay in it.")
    rollout_stop_token_ids: tuple[int, ...] | None = flag(None, "Token ids that end a response.", check=at_least(0))
    rollout_skip_special_tokens: bool = flag(
        False, "Leave special tokens out of the response's text; the one that ends it never is part of it."
    )
    vllm_server_concurrency: int = flag(64, "Requests in flight at one engine.", check=at_least(1))
    partial_rollout: bool = flag(False, "Keep what an aborted request has generated and continue from there.")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "Don't train the part of a continued response that an older policy generated."
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, "Import path of `f(args, samples)` that says whether a group is kept.", check=dotted_path
    )
    rollout_sample_hook_path: tuple[str, ...] = flag(
        (), "Import path of a hook on each sample before its reward; may be given again.", repeated=True,
        check=dotted_path,
    )  # fmt: skip
    rollout_sample_filter_path: str | None = flag(
        None, "Import path of `f(args, groups)` that marks samples of the batch not to train.", check=dotted_path
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "Import path of `f(args, groups, data_source)` that sees kept and dropped groups.", check=dotted_path
    )
    rollout_data_postprocess_path: str | None = flag(
        None,
        "Import path of `f(args, rollout_id, rollout_data)` that may change a rollout's advantages and returns last.",
        check=dotted_path,
    )
    custom_reward_post_process_path: str | None = flag(
        None, "Import path of `f(args, samples)` that returns raw and normalised rewards.", check=dotted_path
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "Import path of `f(args, samples)` that makes the training columns.", check=dotted_path
    )
    rm_type: str | None = flag(
        None,
        "Built-in reward: dapo, deepscaler, f1, gpqa, ifbench, math, random, reasoning_gym or remote_rm, each also as "
        'boxed_NAME, which grades what is in the last \\boxed{}; a record\'s metadata["rm_type"] goes before it.',
        common=True,
    )
    custom_rm_path: str | None = flag(
        None,
        "Import path of your reward: `async def f(args, sample) -> float` for one that waits, `def` for one that "
        "computes (it runs in a process of its own); wins over --rm-type.",
        check=dotted_path,
        common=True,
    )
    group_rm: bool = flag(
        False, "Call your reward once for a whole group: `async def f(args, samples) -> list` of one for each."
    )
    reward_key: str | None = flag(None, "Key of the reward to train on, when the reward is a dict.")
    rm_url: str | None = flag(
        None,
        "Address that --rm-type remote_rm posts prompt, response and label to, as JSON; the answer is the reward.",
    )
    reward_timeout: float = flag(600.0, "Seconds after which a reward call counts as failed.", check=above(0))
    reward_workers: int | None = flag(
        None, "Processes that grade at once; as many as there are cores, up to 4, when left out.", check=at_least(1)
    )
    reward_memory_gib: float = flag(
        4.0, "Memory that one grading process may have, in GiB; one that wants more is replaced.", check=above(0)
    )
    reward_concurrency: int = flag(64, "Requests to --rm-url at once.", check=at_least(1))
    rollout_max_attempts: int = flag(3, "Failed generations of one group before it is set aside.", check=at_least(1))
    rollout_max_failed_fraction: float = flag(
        0.2, "The run stops when a larger fraction of the groups (and at least 8) was set aside.", check=between(0, 1)
    )
    use_distributed_post: bool = flag(False, "Send generation requests from a process on each node.")
    http_proxy: str | None = flag(None, "Proxy for requests to rewards outside the cluster.")
