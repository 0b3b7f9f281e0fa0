"""What runs in a process of the grader pool: bytes in, bytes out. Its memory is bounded; it ends with its parent."""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.graders import grade
from vime.rollout.rewards.scoring import plain_reward
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.utils.types import Sample

OUT_OF_MEMORY = 77
"""Exit status of a worker whose grader wanted more memory than it may have."""

_F_SETSIG = 10
"""Linux; the `fcntl` module doesn't name it."""

_args: list[HookArgs] = []
"""What the user's functions get as `args`; set once, when the process begins."""


class GradeRequest(msgspec.Struct, frozen=True):
    """What to grade: one answer by a built-in grader, or samples by a function of the user's own."""

    grader: str = ""
    answer: Answer | None = None
    function: str = ""
    """Import path."""
    samples: list[dict[str, Any]] = []
    """By `Sample.to_dict`; one, unless `group`."""
    group: bool = False
    """Whether the function takes all samples at once."""


class GradeReply(msgspec.Struct, frozen=True):
    """What came out: `value`, or why there is none."""

    value: Any = None
    metadata: list[dict[str, Any]] = []
    """Of each sample, as the user's function left it."""
    failure: str = ""
    reason: str = ""
    next_step: str = ""


def prepare_worker(memory_bytes: int, settings: bytes) -> None:
    """Bound the memory of this process, and keep the settings for the user's functions."""
    _end_with(multiprocessing.parent_process())
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    _args.append(HookArgs(msgspec.msgpack.decode(settings, type=Settings)))


def grade_bytes(request: bytes) -> bytes:
    """Grade an encoded `GradeRequest`; an encoded `GradeReply`. Ends the process when memory runs out."""
    try:
        reply = _graded(msgspec.msgpack.decode(request, type=GradeRequest))
        return msgspec.msgpack.encode(reply, enc_hook=repr)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except RewardError as error:
        reply = GradeReply(failure=error.message, reason=error.reason, next_step=error.next_step)
    except Exception as error:  # the boundary to graders: whatever they raise becomes the sample's reason
        reply = GradeReply(failure=f"the reward raised {type(error).__name__}: {error}.", reason="reward_raised")
    return msgspec.msgpack.encode(reply)


def _end_with(parent: BaseProcess | None) -> None:
    """Have the kernel kill this process when its parent ends, also while a grader holds the interpreter.

    The parent's end closes the pipe behind its sentinel. The kernel's own signal for a parent's death would be that of
    the fork server, which lives as long as any worker.
    """
    if parent is None:
        return
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def _graded(request: GradeRequest) -> GradeReply:
    if request.answer is not None:
        return GradeReply(plain_reward(grade(request.grader, request.answer)))
    module, _, name = request.function.rpartition(".")
    function = vars(importlib.import_module(module))[name]
    samples = [Sample.from_dict(values) for values in request.samples]
    value = function(_args[0], samples if request.group else samples[0])
    return GradeReply(_plain(value, request.group), [sample.metadata for sample in samples])


def _plain(value: Any, group: bool) -> Any:
    if not group or not isinstance(value, Sequence) or isinstance(value, str):
        return plain_reward(value)
    return [plain_reward(each) for each in value]
