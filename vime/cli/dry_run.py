"""`vime train --dry-run`: what a run would do, without starting it."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.devices import cpu_slots, visible_gpus
from pipeline.evaluation.prompts import open_eval_sets, set_aside_words
from pipeline.fixed_settings import refuse_otherwise_started
from pipeline.model_config import model_config
from pipeline.preview.folders import folder_problems
from pipeline.preview.process_map import Machines, assumed_machines
from pipeline.preview.record_keys import absent_keys
from pipeline.preview.rehearsal import PromptFacts, RewardTrial, prompt_facts, reward_failure, try_reward
from pipeline.preview.report import Preview, Rehearsal, StartFacts, preview
from pipeline.preview.start_checks import first_room, room_problem, room_warnings, router_port_problem
from pipeline.preview.token_room import TokenRoom
from pipeline.prompt_source import build_prompt_source, with_num_rollout
from pipeline.resume_words import resume_words
from pipeline.run_folder import RunFolder
from pipeline.session_start import prepare_start
from pipeline.transports.promise import transport_words
from vime.cli.dry_run_words import render
from vime.cli.exit_codes import ExitCode, exit_code
from vime.data.prompt_stream import PromptStream
from vime.errors import ModelError, SettingsError, VimeError
from vime.rollout.hooks import named_hooks
from vime.settings.groups import Settings
from vime.settings.resolve import Resolved
from vime.settings.rules.data import without_slice


def dry_run(resolved: Resolved, warnings: list[str]) -> int:
    """Print the preview; the exit status is that of the first problem, 0 when there is none.

    Raises:
        SettingsError, ModelError: nothing can be planned with these settings.
    """
    shown = make_preview(resolved, warnings)
    if resolved.settings.command.json:
        print(json.dumps(shown.as_json(), indent=1))
    else:
        print(render(shown))
    return exit_code(shown.problems[0]) if shown.problems else ExitCode.DONE


def make_preview(resolved: Resolved, warnings: list[str]) -> Preview:
    """Read the model's config, the prompt file and the run folder, try the reward, and plan."""
    problems: list[VimeError] = []
    source: PromptStream | None = None
    try:
        source = build_prompt_source(resolved.settings)
        resolved = with_num_rollout(resolved, source)
    except VimeError as error:
        problems.append(error)
    settings = resolved.settings
    problems = [*folder_problems(settings), *_port_problems(settings), *problems]
    try:
        warnings = [*warnings, *(words for each in open_eval_sets(settings) for words in set_aside_words(each))]
    except VimeError as error:
        problems.append(error)
    if source is not None:
        room = _room(settings, source, problems)
        warnings = [*warnings, *room_warnings(room), *absent_keys(settings, source)]
    start = StartFacts()
    try:
        start = start_facts(settings)
    except VimeError as error:
        problems.append(error)
    return preview(
        resolved,
        machines_for(settings),
        model_config(settings),
        start=start,
        rehearsal=_rehearse(settings, source, problems),
        warnings=warnings,
        problems=problems,
    )


def _room(settings: Settings, source: PromptStream, problems: list[VimeError]) -> TokenRoom | None:
    """The room beside the first prompts; where there is none, or a tokenizer that counts none, `problems` say so."""
    try:
        room = first_room(settings, source)
    except ModelError as error:
        problems.append(error)
        return None
    no_room = room_problem(room)
    problems += [] if no_room is None else [no_room]
    return room


def _port_problems(settings: Settings) -> list[VimeError]:
    """Of this machine; none where another cluster is assumed."""
    taken = None if settings.command.assume_gpus is not None else router_port_problem(settings)
    return [] if taken is None else [taken]


def data_problems(resolved: Resolved) -> list[VimeError]:
    """What is wrong with the prompts or, where these can be read, with the reward, beside settings that can't work.

    Nothing of a missing file and of a reward that can't be loaded, which are among those.
    """
    settings = resolved.settings
    path = settings.data.prompt_data
    if path is None or settings.data.data_source_path is not None or not Path(without_slice(path)).is_file():
        return []
    try:
        source = build_prompt_source(settings)
    except VimeError as error:
        return [error]
    try:
        failure = reward_failure(settings, source)
    except SettingsError:
        return []
    except VimeError as error:
        return [error]
    return [] if failure is None else [failure]


def machines_for(settings: Settings) -> Machines:
    """The cluster that --assume-gpus names, else this machine."""
    if settings.command.assume_gpus is not None:
        return assumed_machines(settings, settings.command.assume_gpus)
    gpus = visible_gpus()
    if gpus:
        return Machines(gpus, gpus, "GPU")
    slots = cpu_slots()
    return Machines(slots, slots, "worker process")


def start_facts(settings: Settings) -> StartFacts:
    """What the run folder makes a session start from, with what changed settings mean for it; reads only.

    Raises:
        RestoreError, CommitError: it can't be resumed as asked.
    """
    folder = RunFolder.of(settings)
    start = prepare_start(settings, folder, branch="(new)")
    version = 0 if start.commit is None else start.commit.weight_version
    kept = None if start.state is None else start.state.memory
    words = [*resume_words(settings, folder, start), *transport_words(settings, kept)]
    return StartFacts(start.plan.start_rollout, version, words)


def _rehearse(settings: Settings, source: PromptStream | None, problems: list[VimeError]) -> Rehearsal:
    """Try prompts and reward; failures go to `problems`. Without a source there is nothing to try."""
    prompts: PromptFacts | None = None
    trials: list[RewardTrial] = []
    if source is None:
        return Rehearsal(None, [], named_hooks(settings))
    try:
        refuse_otherwise_started(settings, source)
    except VimeError as error:
        problems.append(error)
    try:
        prompts = prompt_facts(settings, source)
        trials = try_reward(settings, source)
    except VimeError as error:
        problems.append(error)
    return Rehearsal(prompts, trials, named_hooks(settings))
