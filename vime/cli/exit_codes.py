"""The exit status of every command, from the type of the error that ended it. The only place that decides it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from vime import errors


class ExitCode(enum.IntEnum):
    """Exit statuses; `words` says what each means."""

    DONE = 0
    USER = 1
    ENVIRONMENT = 2
    DATA = 3
    INTERNAL = 4
    STALLED = 5
    UNSOUND = 6
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    ExitCode.DONE: "done",
    ExitCode.USER: "the command can't work as given: a flag, a path, or a run that can't be resumed as asked",
    ExitCode.ENVIRONMENT: "the machine or what is installed on it: versions, an engine's start, storage, disk, ports",
    ExitCode.DATA: "data or reward: an unusable record, a failing reward, or more failures than the settings allow",
    ExitCode.INTERNAL: "a process of the run died, or a fault of vime; the message names a file with the trace",
    ExitCode.STALLED: "nothing went on for --stall-timeout seconds, or a process did not answer",
    ExitCode.UNSOUND: "`vime audit` found groups lost or trained twice, or `vime replay --check` a difference",
    ExitCode.INTERRUPTED: "interrupted; the state is saved, the same command resumes",
    ExitCode.OUTPUT_CLOSED: "who read the output went away, as `head` does; nothing is wrong",
}

EXIT_CODES: dict[type[Exception], ExitCode] = {
    errors.SettingsError: ExitCode.USER,
    errors.DataError: ExitCode.USER,
    errors.ModelError: ExitCode.USER,
    errors.NoRunError: ExitCode.USER,
    errors.RestoreError: ExitCode.USER,
    errors.VersionMismatchError: ExitCode.ENVIRONMENT,
    errors.ClusterStartError: ExitCode.ENVIRONMENT,
    errors.EngineStartError: ExitCode.ENVIRONMENT,
    errors.ParityError: ExitCode.ENVIRONMENT,
    errors.StorageError: ExitCode.ENVIRONMENT,
    errors.CommitError: ExitCode.ENVIRONMENT,
    errors.BadRecordError: ExitCode.DATA,
    errors.FailedSampleError: ExitCode.DATA,
    errors.SampleError: ExitCode.DATA,
    errors.RewardError: ExitCode.DATA,
    errors.TooManyFailuresError: ExitCode.DATA,
    errors.StaleLeaseError: ExitCode.INTERNAL,
    errors.EngineError: ExitCode.INTERNAL,
    errors.TrainerError: ExitCode.INTERNAL,
    errors.RunFailedError: ExitCode.INTERNAL,
    errors.StalledError: ExitCode.STALLED,
    Exception: ExitCode.INTERNAL,
}
"""Error type -> exit status; the nearest base class counts for types that aren't listed."""


def exit_code(error: BaseException) -> ExitCode:
    """The exit status for the error that ended a command."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), ExitCode.INTERNAL)


def exit_codes_help(codes: Iterable[ExitCode] = ExitCode) -> str:
    """The table for the end of a help text, of some of them."""
    return "exit status:\n" + "".join(f"  {code.value:<4} {code.words}\n" for code in codes)
