"""A dry run's result in words."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.preview.batch import EffectiveBatch
from pipeline.preview.disk_need import DiskNeed
from pipeline.preview.process_map import EnginePlace, ProcessMap
from pipeline.preview.publications import PlannedPublication
from pipeline.preview.report import Preview, Rehearsal
from pipeline.preview.settings_table import SettingRow
from pipeline.preview.staleness import Staleness
from vime.counted import agreeing, counted

_MAX_ROWS = 32


def render(shown: Preview) -> str:
    """All sections, then warnings and problems, then one line that sums up."""
    sections = [
        ("Start", list(shown.start.words)),
        ("Settings that differ from their defaults", _settings(shown.settings)),
        *[(f"Flags passed on to {owner}", [" ".join(words)]) for owner, words in shown.passed_on.items() if words],
        ("Who runs where", _processes(shown.processes, assumed=shown.machines.assumed)),
        ("Batch", _batch(shown.batch)),
        (f"First {counted(len(shown.publications), 'weight version')}", _publications(shown.publications)),
        ("Staleness", _staleness(shown.staleness, shown.batch.groups)),
        ("Disk", _disk(shown.disk)),
        ("Tried out", _rehearsal(shown.rehearsal)),
        ("Warnings", [f"- {warning}" for warning in shown.warnings]),
        ("Problems", [line for error in shown.problems for line in _problem(error.message, error.next_step)]),
    ]
    text = "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines)
    return f"{text}\n\n{_summary(shown)}"


def _settings(rows: Sequence[SettingRow]) -> list[str]:
    changed = [row for row in rows if row.differs or row.source != "default"]
    table = [(row.flag, _value(row.value), row.source, _value(row.default)) for row in changed]
    widths = [max((len(line[column]) for line in table), default=0) for column in range(3)]
    return [
        f"{flag:{widths[0]}}  {value:{widths[1]}}  {source:{widths[2]}}  (default {default})"
        for flag, value, source, default in table
    ]


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "-"
    return "-" if value is None else str(value)


def _processes(processes: ProcessMap, *, assumed: bool) -> list[str]:
    sizes = processes.sizes
    lines = [f"{processes.words} {counted(processes.num_devices, processes.kind)}{' (assumed)' if assumed else ''}."]
    if processes.trainers:
        lines.append(
            f"Trainer: {counted(len(processes.trainers), 'rank')} = tensor {sizes.tensor} x context {sizes.context} x "
            f"data {sizes.data} x pipeline {sizes.pipeline}{f', expert {sizes.expert}' if sizes.expert > 1 else ''}"
            f"{'; the critic shares these devices' if processes.critic else ''}"
        )
    ranks = [
        f"rank {place.rank}: node {place.device.node} {processes.kind} {place.device.gpu} "
        f"(tp {place.tensor} cp {place.context} dp {place.data} pp {place.pipeline})"
        for place in processes.trainers
    ]
    engines = [f"{_name(engine)}: {engine.address or _devices(processes, engine)}" for engine in processes.engines]
    return [*lines, *_some(ranks), *_some(engines)]


def _name(engine: EnginePlace) -> str:
    return f"engine {engine.number}" if engine.kind == "regular" else f"engine {engine.number} ({engine.kind})"


def _devices(processes: ProcessMap, engine: EnginePlace) -> str:
    return ", ".join(f"node {device.node} {processes.kind} {device.gpu}" for device in engine.devices)


def _some(lines: list[str]) -> list[str]:
    """The first ones, and how many more there are."""
    hidden = len(lines) - _MAX_ROWS
    return lines if hidden <= 0 else [*lines[:_MAX_ROWS], f"... and {hidden} more (all of them with --json)"]


def _batch(batch: EffectiveBatch) -> list[str]:
    microbatch = (
        f"up to {counted(batch.microbatch_tokens, 'token')}"
        if batch.microbatch_tokens is not None
        else counted(batch.microbatch_samples or 0, "sample")
    )
    per_rank = f"{batch.samples_per_rank:g} {agreeing(batch.samples_per_rank, 'sample')}"
    return [
        f"{counted(batch.groups, 'group')} x {batch.samples_per_group} = {counted(batch.samples, 'sample')} a rollout "
        f"batch, {counted(batch.num_rollouts, 'rollout batch')}",
        f"{counted(batch.steps_per_rollout, 'optimizer step')} a rollout batch of "
        f"{counted(batch.samples_per_step, 'sample')}, "
        f"{batch.optimizer_steps} in all",
        f"{per_rank} of a step on each data-parallel rank, in microbatches of {microbatch}",
    ]


def _publications(publications: Sequence[PlannedPublication]) -> list[str]:
    return [
        f"version {publication.version}: {_moment(publication)}, "
        f"{'flush (requests aborted, KV dropped)' if publication.flushes else 'keep (requests and KV go on)'}"
        for publication in publications
    ]


def _moment(publication: PlannedPublication) -> str:
    return "at the start" if publication.after_rollout is None else f"after rollout {publication.after_rollout}"


def _staleness(staleness: Staleness, batch: int) -> list[str]:
    bound = (
        "Nothing bounds the age of a sample whose request outlives publications (--flush-cache-interval 0 or less)."
        if staleness.most is None
        else f"No sample is older than {counted(staleness.most, 'version')} when it is trained."
    )
    return [
        f"At most {counted(staleness.max_groups, 'group')} untrained for batches of {batch}: a finished group is "
        f"trained within {counted(staleness.waiting, 'version')}.",
        f"At most {counted(staleness.groups_in_flight, 'group')} in flight: {staleness.in_flight_mean:.2g} versions "
        "pass on average while one is generated.",
        bound,
    ]


def _disk(disk: DiskNeed) -> list[str]:
    longest = "unlimited prompt" if disk.longest_sequence is None else counted(disk.longest_sequence, "token")
    columns = ", ".join(column.name for column in disk.columns)
    return [
        f"Checkpoint: {size(disk.checkpoint_bytes)} ({disk.parameters / 1e6:.4g} M parameters), "
        f"{counted(disk.num_commits, 'commit')} in the run",
        f"Rollout batch: up to {size(disk.rollout_bytes)}, {size(disk.sample_bytes)} a sample of {longest} with "
        f"{counted(disk.longest_response, 'response token')} ({columns})",
        f"Whole run: up to {size(disk.run_bytes)}",
    ]


def size(num_bytes: int) -> str:
    """Bytes in a unit that fits."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def _rehearsal(tried: Rehearsal) -> list[str]:
    lines = []
    if tried.prompts is not None:
        lines.append(
            f"{counted(tried.prompts.num_prompts, 'prompt')}, {tried.prompts.rollouts_per_epoch:g} rollout batches an "
            f"epoch, {tried.prompts.epochs:.3g} epochs"
        )
        if tried.prompts.num_bad_records:
            bad = tried.prompts.num_bad_records
            lines.append(f"{counted(bad, 'malformed prompt record')} {agreeing(bad, 'is')} skipped")
    lines += [f"Reward {trial.reward:g} for the label {trial.response!r} of {trial.where}" for trial in tried.reward]
    return lines + [f"{hook}: imported, can be called as documented" for hook in tried.hooks]


def _problem(message: str, next_step: str) -> list[str]:
    return [f"- {message}", *([f"  Next: {next_step}"] if next_step else [])]


def _summary(shown: Preview) -> str:
    warnings, refused = counted(len(shown.warnings), "warning"), counted(len(shown.refused), "setting")
    if shown.problems:
        also = f" and {refused} not built yet" if shown.refused else ""
        problems = counted(len(shown.problems), "problem")
        return f"A start would fail: {problems}{also}, {warnings}. Nothing was started."
    if shown.refused:
        return (
            f"A start would refuse {refused} not built yet (see the warnings). No other problem was found, {warnings}. "
            "Nothing was started."
        )
    return f"No problem was found, {warnings}. Nothing was started."
