"""Where metrics go besides the run folder."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import at_least, dotted_path, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class LoggingSettings:
    """Where metrics go besides the run folder."""

    use_wandb: bool = flag(False, "Send metrics to Weights & Biases.")
    wandb_mode: str | None = flag(None, "Mode of Weights & Biases.", choices=("online", "offline", "disabled"))
    wandb_dir: str | None = flag(None, "Folder for Weights & Biases' files; `--save` when left out.", check=place)
    wandb_key: str | None = flag(None, "Key for Weights & Biases; kept out of records.", secret=True)
    wandb_host: str | None = flag(None, "Address of your own Weights & Biases server.")
    wandb_team: str | None = flag(None, "Team at Weights & Biases.")
    wandb_group: str | None = flag(None, "Group of the run at Weights & Biases, and the beginning of its name.")
    wandb_project: str | None = flag(None, "Project of the run at Weights & Biases.")
    wandb_run_id: str | None = flag(
        None, "Run to continue at Weights & Biases; that of the session before when left out."
    )
    wandb_always_use_train_step: bool = flag(False, "Count steps of training in all charts.")
    wandb_random_suffix: bool = flag(
        True,
        "Don't add random letters to the run's name.",
        name="--disable-wandb-random-suffix",
        aliases=("--wandb-disable-random-suffix",),
        inverted=True,
    )
    use_tensorboard: bool = flag(False, "Write metrics for TensorBoard.")
    tb_project_name: str | None = flag(None, "Folder in `<--save>/tensorboard` for TensorBoard's files.")
    tb_experiment_name: str | None = flag(None, "Folder in the former for TensorBoard's files.")
    prometheus_port: int | None = flag(
        None, "Port of the run's own `/metrics` for Prometheus, 0 for a free one; other processes take free ones. "
        "`<--save>/prometheus` tells all. Without it there are none.",
        check=at_least(0),
    )  # fmt: skip
    prometheus_host: str = flag("127.0.0.1", "Address that `/metrics` listens on; 0.0.0.0 for other machines.")
    log_passrate: bool = flag(False, "Report pass@k of each batch, a reward of 1 counting as right.")
    log_multi_turn: bool = flag(False, "Report turns, and lengths with and without the tokens of tools.")
    log_correct_samples: bool = flag(False, "Report share and lengths of the samples with a reward of 1.")
    log_reward_category: str | None = flag(None, "Key of the reward dict to count categories by.")
    custom_rollout_log_function_path: str | None = flag(
        None, "Import path of `f(rollout_id, args, samples, extra_metrics, time)`; True replaces vime's own report.",
        check=dotted_path,
    )  # fmt: skip
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "Import path of `f(rollout_id, args, data, extra_metrics)`; True replaces vime's own report.",
        check=dotted_path,
    )  # fmt: skip
