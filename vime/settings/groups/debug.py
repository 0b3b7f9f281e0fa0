"""Running one half of the system, dumps, and checks of continuous integration."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, above_up_to, at_least, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class DebugSettings:
    """Running one half of the system, dumps, and checks of continuous integration."""

    debug_rollout_only: bool = flag(False, "Generate without training.")
    debug_train_only: bool = flag(False, "Train on stored samples without engines.")
    save_debug_rollout_data: str | None = flag(
        None, "File for each batch's samples; `{rollout_id}` is filled in, `.straw.json` makes an archive.", check=place
    )
    load_debug_rollout_data: str | None = flag(None, "Stored samples to train on, without engines.", check=place)
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Fraction of the stored samples to use.", check=above_up_to(0, 1)
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "Stored samples that take the place of generation while engines run; `{rollout_id}` is filled in.",
        check=place,
    )
    save_debug_train_data: str | None = flag(
        None, "File for each rank's training columns; `{rollout_id}` and `{rank}` are filled in.", check=place
    )
    dump_details: str | None = flag(None, "Folder for the samples and training columns of all batches.", check=place)
    ci_test: bool = flag(False, "Check each optimizer step, and end the run at the first that fails.")
    ci_disable_kl_checker: bool = flag(False, "With --ci-test: leave out the check that KL terms start at zero.")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "Largest mean difference between trainer and sampler that --ci-test accepts.", check=above(0)
    )
    ci_save_grad_norm: str | None = flag(
        None, "File to append each step's gradient norm to, as JSON lines.", check=place
    )
    ci_load_grad_norm: str | None = flag(
        None, "File of --ci-save-grad-norm whose gradient norms must be met, within 1%.", check=place
    )
    memory_recorder: str = flag(
        "torch",
        "Tool that records what trainer ranks allocate: torch on GPUs, memray in the memory of hosts.",
        choices=("torch", "memray"),
    )
    memory_snapshot_dir: str = flag(
        ".", "Folder for what --memory-recorder records, a file for each rank.", check=place
    )
    memory_snapshot_num_steps: int | None = flag(
        None, "Record memory from the start, for so many rollout batches.", check=at_least(1)
    )

    @property
    def trains_only(self) -> bool:
        """Whether stored samples are trained without engines."""
        return self.debug_train_only or self.load_debug_rollout_data is not None

    @property
    def rollout_data_template(self) -> str | None:
        """Path of each batch's samples with `{rollout_id}`; None for no file."""
        if self.dump_details is not None:
            return f"{_escaped(self.dump_details)}/rollout_data/{{rollout_id}}.pt"
        return self.save_debug_rollout_data

    @property
    def train_data_template(self) -> str | None:
        """Path of each rank's training columns with `{rollout_id}` and `{rank}`; None for no file."""
        if self.dump_details is not None:
            return f"{_escaped(self.dump_details)}/train_data/{{rollout_id}}_{{rank}}.pt"
        return self.save_debug_train_data


def _escaped(folder: str) -> str:
    """A folder as part of a template."""
    return folder.replace("{", "{{").replace("}", "}}")
