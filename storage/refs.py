"""References and leases as plain bytes, so that they cross processes without straw's classes."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import straw
from straw import protocol

from vime.errors import CorruptDataError

REF_VERSION = 1


class PoolRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a group, a prompt or a blob lies in a pool, and the digest of the publication that holds it."""

    run_id: str
    path: str
    """Pack file, relative to the pool's root."""
    segment_id: str
    segment_size: int
    segment_checksum: str
    segment_version: int
    checksum_algorithm: str
    offset: int
    ordinal: int
    digest: str
    num_records: int
    num_bytes: int
    version: int = REF_VERSION
    record: int = 0
    """Which record of the publication is meant: prompts share one publication, a group has its own."""


GroupRef = PoolRef
"""A `PoolRef` to a group."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right of one attempt to give a group its result."""

    run_id: str
    queue_id: str
    task_id: str
    attempt_id: str
    generation: int
    """Counts the leases that this group has had, from 1."""
    coordinator_epoch: str
    token: str
    worker_id: str


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def lease_to_bytes(lease: protocol.Lease) -> bytes:
    """A lease of straw as msgpack."""
    return msgspec.msgpack.encode(lease)


def lease_from_bytes(data: bytes) -> Lease:
    """Inverse of `lease_to_bytes`. Raises `CorruptDataError`."""
    return _decode(data, Lease)


def lease_fields(lease: Lease) -> dict[str, object]:
    """The lease in the form in which straw's coordinator takes it; its own class costs a deep copy at each call."""
    return msgspec.structs.asdict(lease)


def ref_fields(ref: PoolRef) -> dict[str, object]:
    """The reference in the form in which straw's coordinator takes it; see `lease_fields`."""
    segment = {
        "run_id": ref.run_id,
        "path": ref.path,
        "segment_id": ref.segment_id,
        "size": ref.segment_size,
        "checksum": ref.segment_checksum,
        "version": ref.segment_version,
        "checksum_algorithm": ref.checksum_algorithm,
        "offset": ref.offset,
    }
    return {
        "manifest": {"segment": segment, "ordinal": ref.ordinal},
        "digest": ref.digest,
        "records": ref.num_records,
        "payload_bytes": ref.num_bytes,
        "tokens": 0,
    }


def to_straw_ref(ref: PoolRef) -> straw.RecordSetRef:
    """The reference in straw's own class."""
    segment = straw.SegmentRef(
        run_id=ref.run_id,
        path=ref.path,
        segment_id=ref.segment_id,
        size=ref.segment_size,
        checksum=ref.segment_checksum,
        version=ref.segment_version,
        checksum_algorithm=ref.checksum_algorithm,
        offset=ref.offset,
    )
    manifest = straw.RecordRef(segment, ref.ordinal)
    return straw.RecordSetRef(manifest, ref.digest, ref.num_records, ref.num_bytes, 0)


def from_straw_ref(ref: straw.RecordSetRef) -> PoolRef:
    """The reference in our own class."""
    segment = ref.manifest.segment
    return PoolRef(
        run_id=segment.run_id,
        path=segment.path,
        segment_id=segment.segment_id,
        segment_size=segment.size,
        segment_checksum=segment.checksum,
        segment_version=segment.version,
        checksum_algorithm=segment.checksum_algorithm,
        offset=segment.offset,
        ordinal=ref.manifest.ordinal,
        digest=ref.digest,
        num_records=ref.records,
        num_bytes=ref.payload_bytes,
    )


def _decode(data: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"{len(data)} bytes are not a {kind.__name__}: {error}.") from error
