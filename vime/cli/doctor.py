"""`vime doctor`: whether this machine can run, and with the flags of a job, whether it can run that job."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, Outcome, failed, passed
from pipeline.doctor.job import job_checks, num_requests
from pipeline.doctor.juicefs import NAME as JUICEFS
from pipeline.doctor.juicefs import juicefs_mount
from pipeline.doctor.machine import gather, machine_checks
from pipeline.doctor.storage import folder_checks, mount_peer_checks
from pipeline.doctor.tokenizer import round_trip
from pipeline.fixed_settings import refuse_otherwise_started
from pipeline.preview.disk_need import longest_sequence
from pipeline.preview.rehearsal import first_prompts
from pipeline.prompt_source import build_prompt_source
from pipeline.run_folder import RunFolder
from pipeline.storage_declaration import read_declaration
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import place
from vime.cli.passed_on import passed_on_problems
from vime.cli.this_machine import asks_for_devices
from vime.counted import counted
from vime.data.prompt_stream import PromptStream
from vime.errors import ModelError, SettingsError, VimeError
from vime.folders import existing_parent
from vime.rollout.tokenizer import load_tokenizer
from vime.settings.groups import Settings
from vime.settings.passed_on import edit_distance, nearest, own_flag_names
from vime.settings.resolve import resolve
from vime.settings.rules.json_files import model_config

USAGE = """usage: vime doctor [FLAG ...] [--json]
       vime doctor --storage DIR [--peer MOUNT_OR_HOST] [--rollout-storage-declaration FILE] [--json]

Check this machine: packages, devices, ports, shared memory, clock, limits. With flags of `vime train` (all or some of
them) also what they need: devices, disk, storage folders, tokenizer and prompts, processes of a previous session.

With --storage only that folder is checked, which must exist: the options of its mount if it is JuiceFS (and that they
are as declared in FILE), writing, fsync, locks, exclusive creation, rename, space and inodes. --peer tries it from two
clients: growing files, fsync, rename, locks, exclusive creation, zeros at the end of a file, clocks. The other client
is a second mount of the same file system on this machine, given by its path, or a node of the Ray cluster that runs
here, given by its host name or address.

Ends with 0 when nothing failed, with 2 otherwise.
"""
NUM_PROMPTS = 8
MAX_EDITS = 2
"""Up to which an unknown flag counts as a misspelt one of the doctor."""


def doctor(words: list[str]) -> int:
    """Run the checks and print them; the exit status.

    Raises:
        SettingsError: a flag is wrong by itself, or means nothing here.
    """
    if "-h" in words or "--help" in words:
        print(USAGE)
        return ExitCode.DONE
    options, words = _storage_options(words)
    resolved = resolve(words)
    settings = resolved.settings
    if options.storage is not None:
        _refuse_job_flags(words)
        return _report(_storage(options.storage, options.peer, settings), as_record=settings.command.json)
    if settings.command.assume_gpus is not None:
        raise SettingsError(
            "--assume-gpus plans for a cluster that is not there, `vime doctor` checks this machine.",
            next_step="Leave it out, or use `vime train --dry-run --assume-gpus N ...`.",
        )
    if unknown := list(passed_on_problems(settings)):
        raise SettingsError(" ".join(map(str, unknown)), next_step=unknown[0].next_step)
    facts = gather()
    checks = machine_checks(facts, num_requests(settings))
    if [word for word in words if word != "--json"]:
        checks += [
            *job_checks(settings, facts, with_devices=asks_for_devices(resolved)),
            *_data_checks(settings),
            *_juicefs(settings),
        ]
    return _report(checks, as_record=settings.command.json)


def _storage_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """`--storage` and `--peer`, and the words that are left for the settings."""
    parser = argparse.ArgumentParser(prog="vime doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--storage", type=place)
    parser.add_argument("--peer")
    options, rest = parser.parse_known_args(words)
    own = ("--storage", "--peer")
    for word in (word.partition("=")[0] for word in rest if word.startswith("--")):
        meant = nearest(word, own)
        if meant and word not in own_flag_names() and edit_distance(word, meant, MAX_EDITS) <= MAX_EDITS:
            raise SettingsError(f"{word} is not a flag; the nearest one is {meant}.", next_step="Correct it.")
    if options.peer is not None and options.storage is None:
        raise SettingsError("--peer goes with --storage only.", next_step="Add --storage DIR.")
    return options, rest


def _refuse_job_flags(words: list[str]) -> None:
    """A folder alone is checked without a job."""
    allowed = ("--rollout-storage-declaration", "--json")
    more = [flag for word in words if word.startswith("--") and (flag := word.partition("=")[0]) not in allowed]
    if more:
        raise SettingsError(
            f"{', '.join(more)} has no effect with --storage, which checks a folder alone; allowed besides: --peer, "
            f"{', '.join(allowed)}.",
            next_step="Leave it out, or leave out --storage to check a job.",
        )


def _storage(folder: Path, peer: str | None, settings: Settings) -> list[Check]:
    """Checks of one folder. Raises `SettingsError` when the declaration can't be read."""
    declaration = read_declaration(settings.queue.rollout_storage_declaration)
    checks = folder_checks(folder, declaration)
    if peer is None or _count(checks, Outcome.FAIL):
        return checks
    if Path(peer).is_dir():
        return checks + mount_peer_checks(folder, Path(peer))
    from pipeline.storage_proof import host_checks

    return checks + host_checks(peer, folder, declaration)


def _report(checks: list[Check], *, as_record: bool) -> int:
    """Print the checks; the exit status."""
    print(json.dumps(as_json(checks), indent=1) if as_record else render(checks))
    return ExitCode.ENVIRONMENT if _count(checks, Outcome.FAIL) else ExitCode.DONE


def as_json(checks: list[Check]) -> dict[str, Any]:
    """Plain values, with the counts."""
    counts = {outcome.value: _count(checks, outcome) for outcome in Outcome}
    return {"checks": [{**dataclasses.asdict(check), "outcome": check.outcome.value} for check in checks], **counts}


def render(checks: list[Check]) -> str:
    """One line a check, its next step below it, and the sum at the end."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.outcome.value:4}  {check.name:{width}}  {check.found}")
        if check.next_step:
            lines.append(f"      {'':{width}}  Next: {check.next_step}")
    lines.append(
        f"\n{_count(checks, Outcome.PASS)} passed, {counted(_count(checks, Outcome.WARN), 'warning')}, "
        f"{_count(checks, Outcome.FAIL)} failed."
    )
    return "\n".join(lines)


def _count(checks: list[Check], outcome: Outcome) -> int:
    return sum(check.outcome is outcome for check in checks)


def _data_checks(settings: Settings) -> list[Check]:
    """The prompt file, and the tokenizer on its first prompts."""
    if settings.data.prompt_data is None:
        return []
    try:
        source = build_prompt_source(settings)
        prompts = first_prompts(source, NUM_PROMPTS)
    except VimeError as error:
        return [failed("prompts", error.message, error.next_step or "Correct the file.")]
    checks = _run_on_disk(settings, source)
    if settings.checkpoint.hf_checkpoint is None:
        return checks
    try:
        tokenizer = load_tokenizer(settings.checkpoint.hf_checkpoint)
    except ModelError as error:
        return [*checks, failed("tokenizer", error.message, error.next_step)]
    return [*checks, round_trip(settings, tokenizer, prompts, longest_sequence(settings, model_config(settings)))]


def _run_on_disk(settings: Settings, source: PromptStream) -> list[Check]:
    """Whether --save, when it is given, holds no run that was started otherwise."""
    if settings.checkpoint.save is None:
        return []
    name = "run in --save"
    try:
        refuse_otherwise_started(settings, source)
    except VimeError as error:
        return [failed(name, error.message, error.next_step)]
    return [passed(name, f"{settings.checkpoint.save} can be started or resumed with these settings")]


def _juicefs(settings: Settings) -> list[Check]:
    if settings.queue.rollout_storage_profile != "juicefs" or (
        settings.checkpoint.save is None and settings.queue.rollout_data_dir is None
    ):
        return []
    try:
        declaration = read_declaration(settings.queue.rollout_storage_declaration)
    except VimeError as error:
        return [failed(JUICEFS, error.message, error.next_step)]
    if declaration is None:
        return [failed(JUICEFS, "No declaration is named.", "Give --rollout-storage-declaration FILE.")]
    return juicefs_mount(existing_parent(RunFolder.of(settings).queue), declaration)
