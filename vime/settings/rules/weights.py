"""Rules on publishing weights: what is sent, through what, and what happens to running requests."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import debug_mode


def kept_requests_have_their_own_gpus(settings: Settings) -> Iterator[Problem]:
    """KV that survives a publication lies in GPU memory that nobody else may take in between."""
    cluster = settings.cluster
    if settings.weights.flush_cache_interval == 1:
        return
    shares = {
        "--colocate": cluster.colocate,
        "--offload-rollout": cluster.offload_rollout is True,
        "--offload": cluster.offload,
        "--release-train": cluster.release_train,
    }
    for flag, is_given in shares.items():
        if is_given:
            yield problem(
                settings,
                f"--flush-cache-interval {flag}",
                allowed=f"--flush-cache-interval 1 with {flag}",
                reason="Requests and KV that outlive a publication need engines that keep running, on own GPUs.",
                next_step=f"Leave out {flag} or --flush-cache-interval.",
            )


def kept_requests_have_a_whole_stream(settings: Settings) -> Iterator[Problem]:
    """In a debug mode one half of the system is missing, so nothing is published."""
    mode = debug_mode(settings)
    if settings.weights.flush_cache_interval != 1 and mode is not None:
        yield problem(
            settings,
            f"--flush-cache-interval {mode}",
            allowed=f"--flush-cache-interval 1 with {mode}",
            reason="Nothing is published while half of the system is left out.",
            next_step="Leave out --flush-cache-interval.",
        )


def deltas_go_through_disk(settings: Settings) -> Iterator[Problem]:
    """A delta is a set of files that each host applies to its copy."""
    weights = settings.weights
    if weights.update_weight_mode == "delta" and weights.update_weight_transport != "disk":
        yield problem(
            settings,
            "--update-weight-mode --update-weight-transport",
            allowed="delta with disk",
            reason="A delta is a set of files that each host applies to its copy.",
            next_step="Give --update-weight-transport disk and --update-weight-disk-dir DIR.",
        )


def deltas_have_a_local_copy(settings: Settings) -> Iterator[Problem]:
    """A delta is applied to the version before it, which each host must hold."""
    weights = settings.weights
    if weights.update_weight_mode == "delta" and weights.update_weight_local_checkpoint_dir is None:
        yield problem(
            settings,
            "--update-weight-mode --update-weight-local-checkpoint-dir",
            allowed="both",
            reason="A delta is applied to the version before it, which each host keeps there.",
            next_step="Give --update-weight-local-checkpoint-dir DIR.",
        )


def deltas_leave_the_host(settings: Settings) -> Iterator[Problem]:
    """Colocated engines read the trainer's memory; files would only add work."""
    if settings.weights.update_weight_mode == "delta" and settings.cluster.colocate:
        yield problem(
            settings,
            "--update-weight-mode --colocate",
            allowed="full with --colocate",
            reason="Engines on the trainer's GPUs take its weights from memory.",
            next_step="Leave out --update-weight-mode.",
        )


def disk_transport_has_a_folder(settings: Settings) -> Iterator[Problem]:
    """Trainer and engines meet in one folder."""
    weights = settings.weights
    if weights.update_weight_transport == "disk" and weights.update_weight_disk_dir is None:
        yield problem(
            settings,
            "--update-weight-transport --update-weight-disk-dir",
            allowed="both",
            reason="Each version is written to a folder that trainer and engines share.",
            next_step="Give --update-weight-disk-dir DIR.",
        )


def disk_settings_have_a_disk_transport(settings: Settings) -> Iterator[Problem]:
    """Without the disk transport these would be ignored."""
    weights = settings.weights
    if weights.update_weight_transport == "disk":
        return
    given = {
        "--update-weight-disk-dir": weights.update_weight_disk_dir,
        "--update-weight-disk-keep-files": weights.update_weight_disk_keep_files or None,
        "--update-weight-local-checkpoint-dir": weights.update_weight_local_checkpoint_dir,
        "--custom-update-weight-post-write-path": weights.custom_update_weight_post_write_path,
        "--vllm-custom-pull-weights-pre-read-hook": weights.vllm_custom_pull_weights_pre_read_hook,
    }
    for flag, value in given.items():
        if value is not None:
            yield problem(
                settings,
                f"{flag} --update-weight-transport",
                allowed="--update-weight-transport disk",
                reason="No version is written to disk.",
                next_step=f"Give --update-weight-transport disk, or leave out {flag}.",
            )


def delta_settings_have_deltas(settings: Settings) -> Iterator[Problem]:
    """Encoding and checksum of files that aren't written."""
    weights = settings.weights
    if weights.update_weight_mode == "delta":
        return
    given = {
        "--update-weight-delta-encoding": weights.update_weight_delta_encoding != "xor",
        "--update-weight-delta-checksum": weights.update_weight_delta_checksum != "xxh3-128",
    }
    for flag, is_given in given.items():
        if is_given:
            yield problem(
                settings,
                f"{flag} --update-weight-mode",
                allowed="--update-weight-mode delta",
                reason="Whole versions are published.",
                next_step=f"Give --update-weight-mode delta, or leave out {flag}.",
            )


RULES = (
    kept_requests_have_their_own_gpus,
    kept_requests_have_a_whole_stream,
    deltas_go_through_disk,
    deltas_have_a_local_copy,
    deltas_leave_the_host,
    disk_transport_has_a_folder,
    disk_settings_have_a_disk_transport,
    delta_settings_have_deltas,
)
