"""Every exception that vime raises on purpose.

A message says what happened, where, the value found, the values allowed, and one next step.
`VimeError.next_step` is kept apart from the message so that the command line can print it on a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class VimeError(Exception):
    """Base of all errors of vime. `next_step` is one sentence that tells the user what to do."""

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries exceptions between processes; keyword arguments need help to survive the trip.
        return (_rebuild, (type(self), self.message, self.next_step))


def _rebuild(cls: type[VimeError], message: str, next_step: str) -> VimeError:
    return cls(message, next_step=next_step)


def joined(errors: Sequence[VimeError], what: str) -> VimeError:
    """The only one of `errors`, or an error of the first one's type that lists all, each with its next step.

    `what` comes after their number: "settings can't work".
    """
    if len(errors) == 1:
        return errors[0]
    lines = [f"{number}. {each.message} Next: {each.next_step}" for number, each in enumerate(errors, start=1)]
    return type(errors[0])("\n".join([f"{len(errors)} {what}:", *lines]), next_step="Correct these and start again.")


def reason_of(error: BaseException) -> str:
    """The words of an error to be put in a message that names the file: without its number, path and full stop."""
    text = str(error).rstrip(". ")
    if isinstance(error, OSError) and error.strerror and text.startswith("[Errno"):
        return error.strerror
    return text or type(error).__name__


class SettingsError(VimeError):
    """A flag is unknown, malformed, or can't be combined with another one."""


class NoRouterError(SettingsError):
    """A user's function asks for a model's engines that aren't served, or not yet."""


class VersionMismatchError(VimeError):
    """Installed vLLM, torch or Megatron-Core don't belong together."""


class DataError(VimeError):
    """A prompt file or one of its records can't be used."""


class BadRecordError(DataError):
    """What a prompt file holds can't be used: a record that the run may not go on without, or all of it."""


class FailedSampleError(VimeError):
    """A sample can't be trained on. `reason` is the word that such failures are counted under."""

    def __init__(self, message: str, *, next_step: str = "", reason: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.reason = reason or self.default_reason

    default_reason = "failed"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_with_reason, (type(self), self.message, self.next_step, self.reason))


def _rebuild_with_reason(cls: type[FailedSampleError], message: str, next_step: str, reason: str) -> FailedSampleError:
    return cls(message, next_step=next_step, reason=reason)


class SampleError(FailedSampleError):
    """A sample breaks the contract of `vime.utils.types.Sample`."""

    default_reason = "sample"


class RewardError(FailedSampleError):
    """A reward function failed or returned something that is not a finite number."""

    default_reason = "reward"


class ModelError(VimeError):
    """The checkpoint names a model that the trainer can't build, or its weights don't fit."""


class ClusterStartError(VimeError):
    """Ray, which starts the processes of a run, did not start, or could not be joined."""


class EngineError(VimeError):
    """An inference engine failed, answered wrongly, or could not be reached."""


class EngineUnavailable(EngineError):
    """An engine could not be reached, did not answer in time, or answered that it is broken: no fault of a request."""


class EngineStartError(EngineError):
    """An inference engine did not become ready; the message carries its last log lines."""


class GenerationAborted(EngineError):
    """The engine aborted the request (a cache flush or a shutdown); the group goes back to the queue."""


class PublicationError(EngineError):
    """A weight publication was not confirmed by the engine; its version was not raised.

    `engines` maps the address of each engine concerned to what is wrong with it, where that is known.
    """

    def __init__(self, message: str, *, next_step: str = "", engines: Mapping[str, str] | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.engines = dict(engines or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_with_engines, (type(self), self.message, self.next_step, self.engines))


def _rebuild_with_engines(
    cls: type[PublicationError], message: str, next_step: str, engines: dict[str, str]
) -> PublicationError:
    return cls(message, next_step=next_step, engines=engines)


class ParityError(VimeError):
    """Trainer and sampler give the same tokens different log-probabilities."""


class StorageError(VimeError):
    """The pool, a pack or a journal can't be written or read."""


class DiskFullError(StorageError):
    """The file system is full or over quota; nothing was lost, and the same call may be repeated."""


class CorruptDataError(StorageError):
    """Stored bytes don't match their digest or schema."""


class SchemaVersionError(StorageError):
    """Stored data was written by a newer layout than this code reads."""


class CoordinatorBusyError(StorageError):
    """Another coordinator holds the queue's lock."""


class StaleLeaseError(StorageError):
    """The lease is no longer the current attempt of its group; its result can't be accepted."""


class CommitError(VimeError):
    """A commit record is missing, incomplete or damaged."""


class NoRunError(VimeError):
    """A folder holds no run, or the run has not what was asked for."""


class RestoreError(VimeError):
    """A run can't be started or resumed as asked."""


class SessionRunningError(RestoreError):
    """Another session is running in the run folder."""


class TrainerError(VimeError):
    """A trainer rank failed or disagrees with the others."""


class RunFailedError(VimeError):
    """The run stopped because one of its processes failed; the cause is in the message."""


class ProcessDiedError(RunFailedError):
    """A process of the run ended without answering, as by a signal; it may be started again."""


class TrainerDiedError(ProcessDiedError):
    """A trainer rank's process ended; what all ranks hold goes back to the newest commit."""


class TooManyFailuresError(RunFailedError):
    """More groups or records were set aside than the settings allow."""


class StalledError(RunFailedError):
    """Nothing went on for longer than --stall-timeout, or a call's own limit; the message says what waits for what."""
