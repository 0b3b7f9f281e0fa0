"""From settings to how groups are checked, stored, and handed to functions of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipeline.enqueue_needs import enqueue_needs
from pipeline.model_config import model_config
from pipeline.pool_wiring import open_bounded_pool
from pipeline.prompt_source import build_prompt_source
from pipeline.queue_data_source import DataSourceSettings, QueueDataSource
from pipeline.run_folder import RunFolder
from pipeline.sample_conversion import Conversion
from pipeline.transports.blocking_queue import RayBlockingQueue
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import EncodedGroup, encode_group
from vime.settings.groups import Settings
from vime.utils.types import Sample


def build_data_source(
    settings: Settings, coordinator: Any, *, branch: str, worker_id: str, policy_version: Callable[[], int]
) -> QueueDataSource:
    """The queue as a rollout function of the user's own gets it; `coordinator` is the handle of its actor."""
    queue, data = settings.queue, settings.data
    needs = enqueue_needs(settings, model_config(settings))
    return QueueDataSource(
        RayBlockingQueue(coordinator),
        open_bounded_pool(settings, coordinator),
        DataSourceSettings(
            worker_id=worker_id,
            branch=branch,
            num_prompts=len(build_prompt_source(settings)),
            n_samples_per_prompt=data.n_samples_per_prompt,
            lease_seconds=queue.rollout_queue_lease_seconds,
            state_folder=RunFolder.of(settings).root / "rollout",
            reward_key=settings.rollout.reward_key,
        ),
        check=partial(check_enqueue, needs=needs),
        encode=group_encoder(settings, needs),
        policy_version=policy_version,
    )


def build_conversion(settings: Settings) -> Conversion | None:
    """How what --custom-convert-samples-to-train-data-path makes is checked and stored; None without it."""
    if settings.rollout.custom_convert_samples_to_train_data_path is None:
        return None
    needs = enqueue_needs(settings, model_config(settings))
    return Conversion(partial(check_enqueue, needs=needs), group_encoder(settings, needs))


def group_encoder(settings: Settings, needs: EnqueueRequirements) -> Callable[[Sequence[Sample]], EncodedGroup]:
    """What makes a group's columns."""
    return partial(
        encode_group,
        reward_key=settings.rollout.reward_key,
        sc_dtype=settings.queue.rollout_queue_sc_dtype,
        num_experts=None if needs.routes is None else needs.routes.num_experts,
    )
