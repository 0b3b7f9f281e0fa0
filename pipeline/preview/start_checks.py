"""What a start can see in the first second, before processes and engines cost a minute."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.preview.folders import not_writable_folders
from pipeline.preview.rehearsal import first_prompts, reward_failure
from pipeline.preview.token_room import TokenRoom, token_room
from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_is_running
from pipeline.session_plan import plan_session
from recovery.restore import RestoreMode
from vime.backends.vllm_utils.listening import claim_port
from vime.data.prompt_stream import PromptStream
from vime.errors import EngineStartError, SettingsError, VimeError, joined
from vime.settings.groups import Settings

NUM_COUNTED = 8
"""Prompts whose tokens are counted."""
RAISE = "Raise --max-tokens-per-gpu, or limit prompts with --rollout-max-prompt-len."


def check_start(settings: Settings, source: PromptStream, folder: RunFolder) -> TokenRoom | None:
    """Refuse what would end the session later, and return the room beside the first prompts; reads only.

    A finished run and one that runs are left to others.

    Raises:
        SettingsError: a folder that nothing can be written to, or no sample fits into a microbatch.
        EngineStartError: the router's port is taken.
        RestoreError: the run can't be resumed as asked.
        ModelError: the tokenizer's file is damaged.
    """
    _refuse(not_writable_folders(settings))
    if session_is_running(folder) or plan_session(settings, new_branch="(new)").mode is RestoreMode.COMPLETE:
        return None
    room = first_room(settings, source)
    found = [router_port_problem(settings), room_problem(room)]
    _refuse([problem for problem in found if problem is not None])
    return room


def _refuse(problems: Sequence[VimeError]) -> None:
    if problems:
        raise joined(problems, "things keep the run from starting")


def reward_warnings(settings: Settings, source: PromptStream) -> list[str]:
    """The reward fails on the first records. A warning: what a model writes may be scored where a label can't be."""
    failure = reward_failure(settings, source)
    return [] if failure is None else [f"The reward may fail on every sample. {failure.message} {failure.next_step}"]


def room_problem(room: TokenRoom | None) -> SettingsError | None:
    """No response fits into a microbatch beside any of the first prompts."""
    return SettingsError(f"{room.words}.", next_step=RAISE) if room is not None and room.fits_nothing else None


def room_warnings(room: TokenRoom | None) -> list[str]:
    """A long response may not fit beside the first prompts."""
    if room is None or room.fits_nothing or not room.may_overflow:
        return []
    return [f"{room.words}: a sample that needs more stops the run. {RAISE}"]


def first_room(settings: Settings, source: PromptStream) -> TokenRoom | None:
    """The room beside the first prompts; None also where a user's own source hands them out."""
    if settings.data.data_source_path is not None:
        return None
    return token_room(settings, first_prompts(source, NUM_COUNTED))


def router_port_problem(settings: Settings) -> EngineStartError | None:
    """The port that the flags name for vime's own router is taken on this machine."""
    port = settings.router.vllm_router_port
    if port is None or settings.router.vllm_router_ip is not None:
        return None
    try:
        claim_port("127.0.0.1", port)
    except EngineStartError as error:
        return EngineStartError(
            f"--vllm-router-port {port}: {error.message}",
            next_step="Stop the program that listens there, give another --vllm-router-port, or leave the flag out: "
            "the system then chooses a free one.",
        )
    return None
