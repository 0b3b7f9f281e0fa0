"""How new weights reach running engines."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, at_least, dotted_path, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class WeightSettings:
    """How new weights reach running engines."""

    flush_cache_interval: int = flag(
        1, "1: flush KV at every publication; N: at every Nth; 0 or less: keep KV and running requests."
    )
    prefix_cache_salt: str = flag(
        "version", "Key of the prefix cache: the policy version, or none.", choices=("version", "none")
    )
    update_weight_mode: str = flag("full", "Publish all weights, or what has changed.", choices=("full", "delta"))
    update_weight_transport: str = flag(
        "nccl", "Send weights through collectives or through a shared folder.", choices=("nccl", "disk")
    )
    update_weight_timeout: float = flag(300.0, "Seconds after which a publication counts as failed.", check=above(0))
    update_weight_buffer_size: int = flag(512 * 1024**2, "Bytes of weights sent at once.", check=at_least(1))
    update_weight_disk_dir: str | None = flag(
        None, "Folder, shared with the engines, that each published version is written to.", check=place
    )
    update_weight_disk_keep_files: bool = flag(False, "Keep published versions after engines have loaded them.")
    update_weight_local_checkpoint_dir: str | None = flag(
        None, "Folder on each engine's host for its copy of the weights.", check=place
    )
    update_weight_delta_encoding: str = flag("xor", "How changed bytes are stored.", choices=("xor", "overwrite"))
    update_weight_delta_checksum: str = flag(
        "xxh3-128", "Checksum that engines verify.", choices=("xxh3-128", "blake3", "adler32")
    )
    update_weights_interval: int = flag(1, "Publish after every N rollout batches.", check=at_least(1))
    update_weights_while_training: str = flag(
        "auto",
        "Publish a copy of the weights while the next batch trains; auto: where trainer and engines have GPUs of their "
        "own and the trainer's have room for it.",
        choices=("auto", "on", "off"),
    )
    check_weight_update_equal: bool = flag(False, "Compare the engines' weights with the trainer's at the start.")
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "Import path of `f(args, version_dir, engines)` that runs on each rank after a version is written.",
        check=dotted_path,
    )
    vllm_custom_pull_weights_pre_read_hook: str | None = flag(
        None,
        "Import path of `f(source_dir, target_version)` that runs in the engine before it reads a version.",
        check=dotted_path,
    )
