"""Rules on the durable queue and the file system under it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem


def queue_settings_have_a_queue(settings: Settings) -> Iterator[Problem]:
    """Other transports keep nothing that could be reclaimed, declared or cut into segments."""
    queue = settings.queue
    if queue.rollout_data_transport == "straw":
        return
    given = {
        "--rollout-data-dir": queue.rollout_data_dir is not None,
        "--rollout-queue-online-gc": queue.rollout_queue_online_gc,
        "--rollout-queue-segment-mib": queue.rollout_queue_segment_mib is not None,
        "--rollout-storage-profile": queue.rollout_storage_profile != "local",
        "--rollout-storage-declaration": queue.rollout_storage_declaration is not None,
    }
    for flag, is_given in given.items():
        if is_given:
            yield problem(
                settings,
                f"{flag} --rollout-data-transport",
                allowed="--rollout-data-transport straw",
                reason="Only the durable queue keeps samples in a folder.",
                next_step=f"Give --rollout-data-transport straw, or leave out {flag}.",
            )


def juicefs_is_declared(settings: Settings) -> Iterator[Problem]:
    """With a write-back cache or cached reads, acknowledged samples can vanish or read as zeros on other hosts."""
    queue = settings.queue
    if (queue.rollout_storage_profile == "juicefs") != (queue.rollout_storage_declaration is not None):
        yield problem(
            settings,
            "--rollout-storage-profile --rollout-storage-declaration",
            allowed="both juicefs and a declaration, or neither",
            reason="The declaration states how JuiceFS is mounted.",
            next_step="Give --rollout-storage-profile juicefs with --rollout-storage-declaration FILE.",
        )


def queue_name_is_one_folder(settings: Settings) -> Iterator[Problem]:
    """The run's name becomes a folder of the pool."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", settings.queue.rollout_queue_run_id) is None:
        yield problem(
            settings,
            "--rollout-queue-run-id",
            found=f"--rollout-queue-run-id is {settings.queue.rollout_queue_run_id!r}",
            allowed="letters, digits, '.', '_' and '-', beginning with a letter or digit",
            reason="It becomes a folder's name.",
            next_step="Choose another name.",
        )


RULES = (queue_settings_have_a_queue, juicefs_is_declared, queue_name_is_one_folder)
