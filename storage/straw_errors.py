"""Errors of straw, told in the terms of vime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from straw import errors as straw

from storage.os_errors import disk_full
from vime.errors import CorruptDataError, SchemaVersionError, StaleLeaseError, StorageError

_NEXT_STEPS: dict[type[Exception], str] = {
    straw.IdempotencyConflict: "Retry with the same content, or use a new id.",
    straw.IndeterminateCommit: "Close and reopen the queue; it then knows whether the last change was made.",
    straw.InvalidReference: "Pass a reference of this pool, published for this very lease.",
    straw.UnsafeRecovery: "Close and reopen the queue, under the profile and run id that created its pool.",
    straw.WriterFenced: "This writer was retired; open a new Pool.",
    straw.StorageUnavailable: "Check the mount and its permissions, then open a new Pool.",
}


@contextmanager
def translated(what: str, root: Path, *, num_bytes: int = 0) -> Iterator[None]:
    """Turn errors of straw inside the block into `StorageError` and its kin, naming `what` and the pool's `root`.

    `num_bytes` is the payload being written, told when the disk is full.
    """
    try:
        yield
    except straw.QuotaExceeded as error:
        raise disk_full(root, num_bytes) from error
    except (straw.StaleAttempt, straw.LeaseExpired) as error:
        raise StaleLeaseError(
            f"{what}: the lease has expired or its group was leased again ({error}).",
            next_step="Throw this result away; the group is in the queue for another attempt.",
        ) from error
    except straw.CorruptData as error:
        raise CorruptDataError(
            f"{what}: stored bytes in pool {root} don't match their digest ({error}).",
            next_step="Restore the file from a copy, or drop the group.",
        ) from error
    except straw.UnsupportedSchema as error:
        raise SchemaVersionError(
            f"{what}: pool {root} holds a record that this straw can't read ({error}).",
            next_step="Use the straw version that wrote the pool, or a newer one.",
        ) from error
    except straw.QueueError as error:
        next_step = next((text for kind, text in _NEXT_STEPS.items() if isinstance(error, kind)), "")
        raise StorageError(f"{what}: {error} (pool {root}).", next_step=next_step) from error
