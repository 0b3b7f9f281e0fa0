"""What a publisher asks of an engine: to stage a version, then to load it. Typed forms of the JSON on the wire."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from vime.errors import PublicationError


class FromGroup(msgspec.Struct, frozen=True, tag="group"):
    """Receive the weights that a joined sender sends next, beside the model."""

    version: int


class FromFolder(msgspec.Struct, frozen=True, tag="folder"):
    """Verify the weights in a version's folder against names and digest of the publisher's receipt.

    `pre_read_hook` is the import path of `f(source_dir, target_version)`, called before anything is read with the
    folder of all versions.
    """

    version: int
    path: str
    names: list[str]
    digest: str
    pre_read_hook: str | None = None


class FromMirror(msgspec.Struct, frozen=True, tag="mirror"):
    """Bring this host's copy in `mirror` to the version published in `source`, and verify the copy.

    `pre_read_hook` is called as of `FromFolder`.
    """

    version: int
    source: str
    mirror: str
    names: list[str]
    digest: str
    lock_timeout_s: float = 600.0
    pre_read_hook: str | None = None


class SharedPart(msgspec.Struct, frozen=True, tag="shared"):
    """One part of a version, in memory of a GPU that another process shares.

    `handles` maps the UUID of a GPU to the handle of its buffer, which holds one DATA packet of `num_bytes` bytes whose
    description takes `meta_bytes` (see `vime.backends.vllm_utils.gpu_share`). `first` begins a version, `last` ends it.
    """

    version: int
    handles: dict[str, str]
    meta_bytes: int
    num_bytes: int
    first: bool
    last: bool


class FromShared(SharedPart, frozen=True, tag="shared"):
    """Copy and verify a part. Parts come in order, each when the one before is staged; the last makes it whole."""


StageRequest: TypeAlias = FromGroup | FromFolder | FromMirror | FromShared


StageState: TypeAlias = Literal["running", "staged", "failed"]


class StageStatus(msgspec.Struct, frozen=True):
    """How the staging of `version` stands; `reason` says why it failed."""

    version: int
    state: StageState
    reason: str = ""


class LoadStaged(msgspec.Struct, frozen=True, tag="staged"):
    """Load the staged version into the model."""

    version: int


class LoadStream(msgspec.Struct, frozen=True, tag="stream"):
    """Load the weights that a joined sender sends next, part by part as they arrive."""

    version: int


class LoadShared(SharedPart, frozen=True, tag="shared"):
    """Load the tensors of a part."""


class RememberHeld(msgspec.Struct, frozen=True, tag="remember"):
    """Note digests of what the model holds now."""


class CompareHeld(msgspec.Struct, frozen=True, tag="compare"):
    """Fail unless the model holds what was noted."""


Update: TypeAlias = LoadStaged | LoadStream | LoadShared | RememberHeld | CompareHeld


def parse_stage_request(content: dict[str, Any]) -> StageRequest:
    """Raises `PublicationError` for anything else."""
    try:
        request: StageRequest = msgspec.convert(content, StageRequest)
    except msgspec.ValidationError as error:
        raise PublicationError(f"A version can't be staged from {content}: {error}.") from error
    return request


def parse_update(content: dict[str, Any]) -> Update:
    """Raises `PublicationError` for anything else."""
    try:
        update: Update = msgspec.convert(content, Update)
    except msgspec.ValidationError as error:
        raise PublicationError(f"Weights can't be updated by {content}: {error}.") from error
    return update
