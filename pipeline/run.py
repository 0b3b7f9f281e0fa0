"""The run: what it starts from is found, checked and said; then one session goes on from there."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path

import msgspec

from pipeline.cluster import Cluster
from pipeline.debug.dumps import save_tokenizer
from pipeline.debug.rollout_only import RolloutOnlySession, generation_alone
from pipeline.debug.train_only import train_stored
from pipeline.evaluation.prompts import open_eval_sets, set_aside_words
from pipeline.evaluation.start import evaluates_first
from pipeline.fixed_settings import fixed_settings
from pipeline.frozen_sources import check_sources
from pipeline.incidents import session_incidents
from pipeline.interrupt import Ending, Interrupts
from pipeline.kept_engines import engine_lease
from pipeline.metric_sinks.sinks import open_sinks
from pipeline.preview.record_keys import absent_keys
from pipeline.preview.start_checks import check_start, reward_warnings, room_warnings
from pipeline.progress import ProgressView
from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside, with_num_rollout
from pipeline.resume_words import resume_words
from pipeline.run_folder import RunFolder
from pipeline.session import Session
from pipeline.session_lock import session_lock
from pipeline.session_start import Start, coordinator_config, prepare_start
from pipeline.storage_proof import prove_here
from pipeline.transports.promise import transport_words
from recovery.claim import claim_queue
from recovery.fixed import hold_to_fixed
from recovery.home import live_at
from recovery.restore import RestoreMode
from storage.files import write_atomically
from vime.errors import RestoreError
from vime.settings.groups import Settings
from vime.settings.record import settings_record
from vime.settings.resolve import Resolved
from vime.settings.rules.quantities import demand_of

logger = logging.getLogger(__name__)


def run_training(resolved: Resolved, view: ProgressView) -> Ending:
    """Run `vime train` to its end; what can be seen at once is refused before anything is written.

    Errors come out as `VimeError`.
    """
    if resolved.settings.debug.trains_only:
        return train_stored(resolved.settings, view)
    with Interrupts(view) as interrupts:
        return _run(resolved, view, interrupts)


def _run(resolved: Resolved, view: ProgressView, interrupts: Interrupts) -> Ending:
    source = build_prompt_source(resolved.settings)
    resolved = with_num_rollout(resolved, source)
    settings = resolved.settings
    if settings.debug.debug_rollout_only:
        settings = generation_alone(settings)
    folder, queue = RunFolder.of(settings), settings.queue
    fixed = fixed_settings(settings, source)
    room = check_start(settings, source, folder)
    folder.make()
    with session_lock(folder):
        start = prepare_start(settings, folder)
        hold_to_fixed(folder.root, fixed)
        live_at(folder.root, folder.root / folder.output)
        later = (words for warns in (absent_keys, reward_warnings) for words in warns(settings, source))
        for words in itertools.chain(room_warnings(room), later):
            view.note(f"warning: {words}")
        for words in resume_words(settings, folder, start):
            view.note(words)
        left_out = [words for each in open_eval_sets(settings) for words in set_aside_words(each)]
        for words in [*set_bad_prompts_aside(source, folder.bad_prompts), *left_out]:
            view.note(words)
        evaluates = evaluates_first(settings, folder.root, step=start.plan.start_rollout, parent=start.parent)
        if start.plan.mode is RestoreMode.COMPLETE and not evaluates:
            return Ending.DONE
        if start.plan.mode is RestoreMode.COMPLETE and settings.data.num_rollout:
            view.note(f"The evaluation after step {start.plan.start_rollout} is missing and is made now.")
        for words in transport_words(settings, None if start.state is None else start.state.memory):
            view.note(words)
        check_sources(settings)
        if not settings.queue.is_in_memory:
            prove_here(folder.queue, settings.queue)
            claim_queue(folder.root, folder.queue, has_commits=start.commit is not None)
        _remove_leftovers(folder)
        write_atomically(folder.settings, settings_record(resolved))
        write_atomically(folder.settings_of(start.branch), settings_record(resolved))
        if settings.debug.dump_details is not None:
            save_tokenizer(settings.checkpoint.hf_checkpoint or "", Path(settings.debug.dump_details) / "tokenizer")
        view.stage("Ray starts." if "RAY_ADDRESS" not in os.environ else "The Ray cluster is joined.")
        with (
            session_incidents(folder.incidents) as incidents,
            engine_lease(settings, folder, view.note),
            Cluster(demand_of(settings), queue.rollout_num_producers, carries_samples=queue.is_in_memory) as cluster,
        ):
            if settings.debug.debug_rollout_only:
                return interrupts.run(_generate(settings, folder, start, cluster, view, interrupts))
            with open_sinks(settings, folder, start.plan.start_rollout, view.note) as sinks:
                session = Session(
                    settings, folder, start, cluster, view, interrupts, sinks, incidents, evaluates_first=evaluates
                )
                return interrupts.run(session.run())


async def _generate(
    settings: Settings, folder: RunFolder, start: Start, cluster: Cluster, view: ProgressView, interrupts: Interrupts
) -> Ending:
    """--debug-rollout-only."""
    if start.commit is not None:
        raise RestoreError(
            f"--debug-rollout-only with --save {folder.root}, whose run has a commit: its weights would not be served.",
            next_step="Give another --save, and as --hf-checkpoint what --save-hf exported.",
        )
    config = coordinator_config(settings, start, start.branch)
    return await RolloutOnlySession(settings, folder, config, cluster, view, interrupts).run()


def _remove_leftovers(folder: RunFolder) -> None:
    """Ray's temporary folder of a session that was killed."""
    if folder.processes.exists():
        try:
            previous = msgspec.json.decode(folder.processes.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("%s can't be read, so nothing of the session before is removed: %s", folder.processes, error)
            return
        shutil.rmtree(str(previous.get("ray_folder", "")), ignore_errors=True)
