"""Whether a run folder lets a session with these settings go on with what it holds."""

from __future__ import annotations

from pipeline.run_folder import RunFolder
from recovery.claim import is_claimed
from recovery.fixed import FixedSettings, refuse_changed
from recovery.run_on_disk import scan_run
from vime.data.prompt_stream import PromptStream
from vime.settings.groups import Settings


def fixed_settings(settings: Settings, source: PromptStream) -> FixedSettings:
    """The settings that can't change while the run lives."""
    data = settings.data
    return FixedSettings(
        run_id=settings.queue.rollout_queue_run_id,
        dataset_digest=source.dataset_digest(),
        n_samples_per_prompt=data.n_samples_per_prompt,
        rollout_shuffle=data.rollout_shuffle,
        rollout_seed=data.rollout_seed,
        transport=settings.queue.rollout_data_transport,
    )


def refuse_otherwise_started(settings: Settings, source: PromptStream) -> None:
    """Refuse what a start would refuse of a run folder that is in use; reads only.

    Raises:
        RestoreError: the run was started with other fixed settings, or its queue is another.
    """
    folder = RunFolder.of(settings)
    refuse_changed(folder.root, fixed_settings(settings, source))
    if not settings.queue.is_in_memory:
        is_claimed(folder.root, folder.queue, has_commits=bool(scan_run(folder.root, folder.queue).commits))
