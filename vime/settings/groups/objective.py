"""What the optimizer minimises."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, all_or_at_least, at_least, between, dotted_path, place
from vime.settings.flag import flag

GROUP_RELATIVE = ("grpo", "gspo", "cispo")
"""Estimators whose advantage is the group-normalised reward alone."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the optimizer minimises."""

    advantage_estimator: str = flag(
        "grpo",
        "How advantages come from rewards.",
        choices=("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    )
    pg_loss_type: str | None = flag(
        None,
        "Policy objective; when left out reinforce with score centering, cispo for cispo, otherwise ppo.",
        choices=("ppo", "reinforce"),
    )
    loss_type: str = flag("policy_loss", "Kind of loss.", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(
        None, "Import path of the loss of --loss-type custom_loss.", check=dotted_path
    )
    calculate_per_token_loss: bool = flag(False, "Mean over tokens instead of mean over samples.")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "Import path of a function that makes the reducer of the policy loss.", check=dotted_path
    )
    eps_clip: float = flag(0.2, "Lower clip range of the importance ratio.", check=at_least(0))
    eps_clip_high: float | None = flag(None, "Upper clip range; --eps-clip when left out.", check=at_least(0))
    eps_clip_c: float | None = flag(None, "Dual clip: bound of the loss for negative advantages.", check=above(1))
    value_clip: float = flag(0.2, "Clip range of the critic's value.", check=at_least(0))
    gamma: float = flag(1.0, "Discount of later rewards.", check=between(0, 1))
    lambd: float = flag(1.0, "Lambda of generalised advantage estimation.", check=between(0, 1))
    num_critic_only_steps: int = flag(0, "First rollout batches that train the critic only.", check=at_least(0))
    normalize_advantages: bool = flag(False, "Whiten advantages over all trained tokens of the step.")
    grpo_std_normalization: bool = flag(
        True, "Don't divide by the group's standard deviation.", name="--disable-grpo-std-normalization", inverted=True
    )
    rewards_normalization: bool = flag(
        True, "Use raw rewards as advantages.", name="--disable-rewards-normalization", inverted=True
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "Leave advantages and returns out, for supervised fine-tuning or a custom loss.",
        name="--disable-compute-advantages-and-returns",
        inverted=True,
    )
    custom_advantage_function_path: str | None = flag(
        None, "Import path of `f(args, rollout_data)` that sets advantages and returns.", check=dotted_path
    )
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.")
    kl_coef: float = flag(0.0, "Weight of the KL penalty in the rewards.")
    use_kl_loss: bool = flag(False, "Add a KL term against the reference model to the loss.")
    kl_loss_coef: float = flag(0.0, "Weight of the KL term in the loss; 0 only reports it.")
    kl_loss_type: str = flag("k1", "Estimator of the KL term.", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "Multiply the KL term by the ratio of current to old policy.")
    use_rollout_entropy: bool = flag(False, "Compute the entropy together with the old log-probabilities.")
    use_rollout_logprobs: bool = flag(False, "Take the sampler's log-probabilities as those of the old policy.")
    use_tis: bool = flag(False, "Truncated importance sampling: weight tokens by clipped trainer / sampler ratio.")
    tis_clip: float = flag(2.0, "Upper bound of the importance weight.", check=above(0))
    tis_clip_low: float = flag(0.0, "Lower bound of the importance weight.", check=at_least(0))
    custom_tis_function_path: str | None = flag(
        None, "Import path of another weighting, for example IcePop.", check=dotted_path
    )
    get_mismatch_metrics: bool = flag(False, "Report trainer-sampler mismatch without correcting it.")
    use_opsm: bool = flag(False, "Don't train negative advantages of sequences far from the old policy.")
    opsm_delta: float = flag(1e-4, "Mean KL of a sequence above which --use-opsm masks it.", check=at_least(0))
    use_score_centering: bool = flag(False, "Subtract the sampler's expected score, which reduces mismatch drift.")
    score_centering_top_k: int = flag(
        128, "Sampler's most probable tokens kept for each response token, when --rollout-top-p is 1.",
        check=at_least(1),
    )  # fmt: skip
    use_opd: bool = flag(False, "On-policy distillation: add the reverse KL to a teacher to the advantages.")
    opd_type: str | None = flag(None, "Where the teacher runs.", choices=("vllm", "megatron"))
    opd_kl_coef: float = flag(1.0, "Weight of the teacher's reverse KL.")
    opd_teacher_load: str | None = flag(None, "Megatron checkpoint of the teacher.", check=place)
    opd_teacher_ckpt_step: int | None = flag(None, "Step of the teacher's checkpoint.", check=at_least(0))
    opd_teacher_model: str | None = flag(None, "Name of the teacher among the models of --vllm-config.")
    opd_teacher_scoring: str = flag(
        "prompt-logprobs",
        "How a vLLM teacher scores a response: in one request, or one request a position.",
        choices=("prompt-logprobs", "per-position"),
    )
    use_routing_replay: bool = flag(False, "Replay the experts of the trainer's first forward pass in the second.")
    use_rollout_routing_replay: bool = flag(False, "Replay the sampler's experts in training (R3).")
    routing_replay_prefetch_microbatches: int = flag(
        1, "Microbatches whose routes are fetched ahead.", check=at_least(0)
    )
    log_probs_chunk_size: int = flag(
        -1, "Rows of logits that exist at once in float32; -1 leaves it to vime.", check=all_or_at_least(1)
    )
    recompute_loss_function: bool = flag(False, "Compute the loss again in the backward pass to save memory.")

    @property
    def is_supervised(self) -> bool:
        """Whether records are trained as they are, and nothing is generated."""
        return self.loss_type == "sft_loss"

    @property
    def policy_objective(self) -> str:
        """ppo, cispo or reinforce: what is asked for, or what follows from estimator and score centering."""
        if self.pg_loss_type is not None:
            return self.pg_loss_type
        if self.use_score_centering:
            return "reinforce"
        return "cispo" if self.advantage_estimator == "cispo" else "ppo"

    @property
    def centers_rewards(self) -> bool:
        """Whether the mean of the group is taken from each reward; other estimators have a baseline of their own."""
        is_centred = self.advantage_estimator in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline")
        return is_centred and self.rewards_normalization and not self.is_supervised

    @property
    def divides_by_std(self) -> bool:
        """Whether centred rewards are divided by the group's standard deviation."""
        return self.advantage_estimator in GROUP_RELATIVE and self.grpo_std_normalization
