"""`vime doctor`: whether this machine can run, and with the flags of a job, whether it can run that job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, Outcome, failed
from pipeline.doctor.job import job_checks, num_requests
from pipeline.doctor.juicefs import juicefs_mount
from pipeline.doctor.machine import gather, machine_checks
from pipeline.doctor.tokenizer import round_trip
from pipeline.preview.rehearsal import first_prompts
from pipeline.prompt_source import build_prompt_source
from pipeline.run_folder import RunFolder
from pipeline.storage_declaration import read_declaration
from storage.preflight import existing_parent
from vime.cli.exit_codes import ExitCode
from vime.errors import SettingsError, VimeError
from vime.settings.groups import Settings
from vime.settings.resolve import resolve

USAGE = """usage: vime doctor [FLAG ...] [--json]

Check this machine: packages, devices, ports, shared memory, clock, limits. With flags of `vime train` (all or some of
them) also what they need: devices, disk, storage folders, tokenizer and prompts, processes of a previous session.
Ends with 0 when nothing failed, with 2 otherwise.
"""
NUM_PROMPTS = 8


def doctor(words: list[str]) -> int:
    """Run the checks and print them; the exit status.

    Raises:
        SettingsError: a flag is wrong by itself, or means nothing here.
    """
    if "-h" in words or "--help" in words:
        print(USAGE)
        return ExitCode.DONE
    settings = resolve(words).settings
    if settings.command.assume_gpus is not None:
        raise SettingsError(
            "--assume-gpus plans for a cluster that is not there, `vime doctor` checks this machine.",
            next_step="Leave it out, or use `vime train --dry-run --assume-gpus N ...`.",
        )
    facts = gather()
    checks = machine_checks(facts, num_requests(settings))
    if [word for word in words if word != "--json"]:
        checks += [*job_checks(settings, facts), *_data_checks(settings), *_juicefs(settings)]
    if settings.command.json:
        print(json.dumps(as_json(checks), indent=1))
    else:
        print(render(checks))
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
        f"\n{_count(checks, Outcome.PASS)} passed, {_count(checks, Outcome.WARN)} warnings, "
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
    if settings.checkpoint.hf_checkpoint is None:
        return []
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint.hf_checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [failed("tokenizer", f"It can't be loaded: {reason}", "Restore its files in --hf-checkpoint.")]
    return [round_trip(settings, tokenizer, prompts)]


def _juicefs(settings: Settings) -> list[Check]:
    if settings.queue.rollout_storage_profile != "juicefs" or (
        settings.checkpoint.save is None and settings.queue.rollout_data_dir is None
    ):
        return []
    folder: Path = existing_parent(RunFolder.of(settings).queue)
    try:
        declaration = read_declaration(settings.queue.rollout_storage_declaration)
    except VimeError as error:
        return [failed("JuiceFS mount", error.message, error.next_step)]
    return [juicefs_mount(folder, declaration)]
