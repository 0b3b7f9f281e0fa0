"""Where the model comes from and where the run is kept."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import at_least, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class CheckpointSettings:
    """Where the model comes from and where the run is kept."""

    hf_checkpoint: str | None = flag(
        None, "Hugging Face folder: tokenizer, config and initial weights.", common=True, check=place
    )
    model_name: str | None = flag(
        None, "Family of models whose shape and weight names hold, in place of the model_type in config.json."
    )
    ref_load: str | None = flag(
        None, "Checkpoint of the reference model; the actor starts there without --load.", check=place
    )
    ref_ckpt_step: int | None = flag(None, "Step of the reference model's checkpoint.", check=at_least(0))
    ref_update_interval: int | None = flag(
        None, "Copy the actor to the reference model after every N rollout batches.", check=at_least(1)
    )
    load: str | None = flag(
        None,
        "Run to resume: its --save folder or one `committed_N.json`; or weights that a new run starts with: a folder "
        "of a Hugging Face model or of Megatron checkpoints.",
        common=True,
        check=place,
    )
    save: str | None = flag(None, "Run folder: checkpoints, queue, logs and metrics.", common=True, check=place)
    save_interval: int | None = flag(None, "Commit after every N rollout batches.", check=at_least(1))
    keep_checkpoints: int | None = flag(
        None,
        "Commits that are kept in each folder of the run, the newest ones; older checkpoints are removed unless a "
        "branch or a reader needs them. All when left out.",
        check=at_least(1),
    )
    keep_every: int | None = flag(
        None, "With --keep-checkpoints: also keep the commit after every N rollout batches, for good.",
        check=at_least(1),
    )  # fmt: skip
    ckpt_step: int | None = flag(
        None, "Resume from the commit of this rollout instead of the newest.", check=at_least(0)
    )
    start_rollout_id: int | None = flag(
        None,
        "First rollout batch to train, if it must be that one: a run begins at 0 or goes on after its commit.",
        check=at_least(0),
    )
    save_hf: str | None = flag(
        None, "Folder for Hugging Face exports at each save; `{rollout_id}` is filled in.", check=place
    )
    no_save_optim: bool = flag(
        False, "Leave the optimizer's state out of checkpoints; a resume begins with a new optimizer."
    )
    async_save: bool = flag(False, "Write checkpoints in the background.")
