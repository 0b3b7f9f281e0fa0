"""Rules on prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem

GYM_PREFIX = "reasoning_gym:"
"""Before the name of a data set that is made rather than read, as `vime.data.gym` has it."""
_SLICE = re.compile(r"@\[(-?\d*):(-?\d*)\]$")


def without_slice(path: str) -> str:
    """The file of `path@[start:end]`."""
    return _SLICE.sub("", path)


def prompt_files_are_of_a_known_kind(settings: Settings) -> Iterator[Problem]:
    """The reader is chosen by the name's ending."""
    path = settings.data.prompt_data
    if path is None or settings.data.data_source_path is not None:
        return
    if not path.startswith(GYM_PREFIX) and not without_slice(path).endswith((".jsonl", ".parquet")):
        yield problem(
            settings,
            "--prompt-data",
            allowed="a .jsonl or .parquet file, with @[start:end] for some of its rows, or reasoning_gym:NAME",
            reason="The reader is chosen by the name's ending.",
            next_step="Convert the file, or give --data-source-path.",
        )


def a_prompt_leaves_room_for_a_response(settings: Settings) -> Iterator[Problem]:
    """A prompt as long as the context leaves no token for the response."""
    prompt, context = settings.data.rollout_max_prompt_len, settings.rollout.rollout_max_context_len
    if prompt is not None and context is not None and prompt > context - 1:
        yield problem(
            settings,
            "--rollout-max-prompt-len --rollout-max-context-len",
            allowed=f"{context - 1} or less",
            reason="A response needs at least one token.",
            next_step="Lower --rollout-max-prompt-len or leave it out.",
        )


def the_queue_orders_its_buffer_itself(settings: Settings) -> Iterator[Problem]:
    """The durable queue hands out by policy version, then first in first out; a filter would break its accounting."""
    if settings.data.buffer_filter_path is not None and settings.queue.rollout_data_transport == "straw":
        yield problem(
            settings,
            "--buffer-filter-path --rollout-data-transport",
            allowed="no --buffer-filter-path with straw",
            reason="The durable queue accounts for every group and orders them itself.",
            next_step="Leave out --buffer-filter-path.",
        )


def template_arguments_have_a_template(settings: Settings) -> Iterator[Problem]:
    """Arguments without --apply-chat-template would be ignored."""
    if settings.data.apply_chat_template_kwargs and not settings.data.apply_chat_template:
        yield problem(
            settings,
            "--apply-chat-template-kwargs --apply-chat-template",
            allowed="both",
            reason="The chat template is not applied.",
            next_step="Give --apply-chat-template.",
        )


RULES = (
    prompt_files_are_of_a_known_kind,
    a_prompt_leaves_room_for_a_response,
    the_queue_orders_its_buffer_itself,
    template_arguments_have_a_template,
)
