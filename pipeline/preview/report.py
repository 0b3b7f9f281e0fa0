"""Everything a dry run says, from settings and facts: pure assembly of the parts in this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.preview.batch import EffectiveBatch, effective_batch
from pipeline.preview.disk_need import DiskNeed, disk_need
from pipeline.preview.process_map import Machines, ProcessMap, map_processes
from pipeline.preview.publications import PlannedPublication, first_publications
from pipeline.preview.rehearsal import PromptFacts, RewardTrial
from pipeline.preview.settings_table import SettingRow, settings_table
from pipeline.preview.staleness import Staleness, staleness_of
from vime.counted import counted
from vime.errors import SettingsError, VimeError
from vime.settings.groups import Settings
from vime.settings.refusals import refused
from vime.settings.resolve import Resolved


@dataclass(frozen=True)
class StartFacts:
    """What the session would start from: the first rollout, the weight version before it, and a sentence each."""

    rollout: int = 0
    version: int = 0
    words: Sequence[str] = ("New run.",)


@dataclass(frozen=True)
class Rehearsal:
    """What was tried: the prompt file (None when it can't be read) and the reward."""

    prompts: PromptFacts | None = None
    reward: Sequence[RewardTrial] = ()
    hooks: Sequence[str] = ()
    """Flag and path of the hooks that were imported and can be called as documented."""


@dataclass(frozen=True)
class Preview:
    """A dry run's result. `warnings` don't stop a start, `problems` do, and so do the settings in `refused`, which are
    among the warnings because a dry run may plan with what isn't built yet."""

    start: StartFacts
    settings: list[SettingRow]
    passed_on: dict[str, tuple[str, ...]]
    machines: Machines
    processes: ProcessMap
    batch: EffectiveBatch
    publications: list[PlannedPublication]
    disk: DiskNeed
    staleness: Staleness
    rehearsal: Rehearsal
    warnings: list[str]
    refused: list[str]
    problems: list[VimeError]

    def as_json(self) -> dict[str, Any]:
        """Plain values, with every setting."""
        parts = {field.name: vars(self)[field.name] for field in dataclasses.fields(self)}
        problems = [_problem(error) for error in parts.pop("problems")]
        return {**{name: _plain(part) for name, part in parts.items()}, "problems": problems}


def preview(
    resolved: Resolved,
    machines: Machines,
    hf_config: Mapping[str, Any],
    *,
    start: StartFacts,
    rehearsal: Rehearsal,
    warnings: Sequence[str],
    problems: Sequence[VimeError],
) -> Preview:
    """Assemble the preview; adds the warnings and problems that follow from the parts.

    Raises:
        SettingsError: the ranks don't fit the parallel sizes.
        ModelError: `config.json` lacks a size.
    """
    settings = resolved.settings
    processes = map_processes(settings, machines)
    batch = effective_batch(settings, processes.sizes.data)
    disk = disk_need(settings, hf_config)
    staleness = staleness_of(settings, len(processes.engines))
    return Preview(
        start=start,
        settings=settings_table(resolved),
        passed_on={
            "vllm": settings.vllm_args,
            "router": settings.router_args,
            "megatron": settings.megatron_args,
        },
        machines=machines,
        processes=processes,
        batch=batch,
        publications=first_publications(
            start_version=start.version,
            start_rollout=start.rollout,
            num_rollout=batch.num_rollouts,
            flush_interval=settings.weights.flush_cache_interval,
            publish_every=settings.weights.update_weights_interval,
        ),
        disk=disk,
        staleness=staleness,
        rehearsal=rehearsal,
        warnings=[*warnings, *_warnings(settings, processes, batch, disk, staleness)],
        refused=refused(settings),
        problems=[*problems, *_problems(processes, machines)],
    )


def _problems(processes: ProcessMap, machines: Machines) -> list[VimeError]:
    if processes.num_devices <= machines.num_devices:
        return []
    where = "--assume-gpus gives" if machines.assumed else "this machine has"
    return [
        SettingsError(
            f"The run needs {len(processes.trainers)} (training) and "
            f"{sum(len(engine.devices) for engine in processes.engines)} (generation), {processes.shape}: "
            f"{counted(processes.num_devices, processes.kind)}; {where} {machines.num_devices}.",
            next_step="Lower --actor-num-gpus-per-node or --rollout-num-gpus, or plan for more with --assume-gpus N.",
        )
    ]


def _warnings(
    settings: Settings, processes: ProcessMap, batch: EffectiveBatch, disk: DiskNeed, staleness: Staleness
) -> list[str]:
    warnings = []
    if processes.engines_across_nodes:
        numbers = ", ".join(str(number) for number in processes.engines_across_nodes)
        warnings.append(f"Engines {numbers} lie across nodes: their workers exchange each layer through the network.")
    longest, budget = disk.longest_sequence, batch.microbatch_tokens
    if longest is not None and budget is not None and longest > budget:
        warnings.append(
            f"A sequence may have {counted(longest, 'token')}, a microbatch {budget} (--max-tokens-per-gpu x context "
            "parallel size): a longer one stops the run."
        )
    if batch.samples_per_step % processes.sizes.data:
        warnings.append(
            f"{counted(batch.samples_per_step, 'sample')} of a step over "
            f"{counted(processes.sizes.data, 'data-parallel rank')}: some get "
            "one more than others."
        )
    if settings.checkpoint.save_interval is None:
        warnings.append("--save-interval is left out: the run commits only at its end, a crash goes back to its start.")
    if staleness.max_groups < batch.groups * 2:
        warnings.append(
            f"--rollout-queue-max-groups {staleness.max_groups} is less than two batches of {batch.groups}: engines "
            "stand idle while a batch is trained."
        )
    return warnings


def _problem(error: VimeError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": error.message, "next_step": error.next_step}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
