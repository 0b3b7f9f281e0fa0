"""From settings to what each process needs for publications."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from pipeline.devices import visible_gpus
from pipeline.weight_transports.disk import DiskSettings, DiskSource, DiskTransport
from pipeline.weight_transports.group import GroupSource, GroupTransport
from pipeline.weight_transports.shared import SharedTransport, SharingSource
from pipeline.weight_transports.transport import WeightTransport
from storage.disk_reserve import GIB
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs

if TYPE_CHECKING:  # it loads torch, which the driver doesn't need
    from pipeline.trainer_weights import NamedWeights, TrainerWeights
    from vime.backends.vllm_utils.disk.codec import Encoding


BESIDE_BYTES = 4 << 30
"""Weights up to this size an engine on a GPU receives beside its model, while it samples: vLLM leaves a tenth of the
memory free. Larger ones arrive in the pause, part by part."""


class WeightSource(GroupSource, DiskSource, SharingSource, Protocol):
    """The trainer's side of every transport."""


def weight_transport(settings: Settings, source: WeightSource) -> WeightTransport:
    """The transport that the settings name, on the devices that there are."""
    weights = settings.weights
    if weights.update_weight_transport == "disk":
        local = weights.update_weight_local_checkpoint_dir
        return DiskTransport(
            source,
            DiskSettings(
                local_dir=None if local is None else Path(local),
                keep_files=weights.update_weight_disk_keep_files,
                pre_read_hook=weights.vllm_custom_pull_weights_pre_read_hook,
            ),
        )
    on_gpus = visible_gpus() > 0
    is_small = on_gpus and fits_beside(Path(settings.checkpoint.hf_checkpoint or ""))
    if on_gpus and settings.cluster.colocate:
        return SharedTransport(source, stages=is_small and not settings.cluster.engines_leave_memory)
    return GroupTransport(
        source,
        streams=on_gpus and not is_small,
        streams_after_failure=on_gpus,
        timeout_s=weights.update_weight_timeout,
    )


def fits_beside(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint's folder are known to be that small."""
    sizes = [file.stat().st_size for file in checkpoint.glob("*.safetensors")]
    return bool(sizes) and sum(sizes) <= BESIDE_BYTES


def trainer_weights(settings: Settings, trainer: NamedWeights, rank: int) -> TrainerWeights:
    """One rank's part in publications."""
    from pipeline.trainer_weights import PublishSettings, TrainerWeights
    from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter

    weights = settings.weights
    is_delta = weights.update_weight_mode == "delta"
    encoding = cast("Encoding", weights.update_weight_delta_encoding)
    return TrainerWeights(
        trainer,
        rank,
        PublishSettings(
            backend="nccl" if visible_gpus() else "gloo",
            buffer_bytes=weights.update_weight_buffer_size,
            disk_dir=None if weights.update_weight_disk_dir is None else Path(weights.update_weight_disk_dir),
            post_write_hook=weights.custom_update_weight_post_write_path,
        ),
        make_writer=partial(
            VersionWriter,
            delta=DeltaFormat(encoding, weights.update_weight_delta_checksum) if is_delta else None,
            configuration=Path(settings.checkpoint.hf_checkpoint or ""),
            reserve_bytes=round(settings.queue.rollout_disk_reserve_gib * GIB),
        ),
        hook_args=HookArgs(settings),
    )
