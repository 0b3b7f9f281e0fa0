"""An engine host's own copy of the weights, brought from version to version by what is published.

`<local>/current/` is a checkpoint folder; `<local>/mirror.json` says which version it holds. A delta is applied in
place, so the file first says what is being applied: a copy whose update was interrupted is refused until a whole
version arrives. Engines of one host share the copy; a lock lets one of them update it, and the others find it done.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import msgspec
from filelock import FileLock, Timeout

from vime.backends.vllm_utils.disk.checksum import checksum
from vime.backends.vllm_utils.disk.codec import Encoding, apply_change
from vime.backends.vllm_utils.disk.files import FileHeader, map_file, read_header
from vime.backends.vllm_utils.disk.layout import Index, read_index, version_folder
from vime.errors import PublicationError

_FULL_NEXT = "The next publication must be a whole version."


class _State(msgspec.Struct, frozen=True):
    version: int | None
    """None while a version is being written, and after one that failed."""


class HostMirror:
    """The copy in one folder of this host."""

    def __init__(self, local: Path, *, lock_timeout_s: float = 600.0) -> None:
        self._local, self._lock_timeout_s = local, lock_timeout_s

    @property
    def folder(self) -> Path:
        """The checkpoint folder."""
        return self._local / "current"

    @property
    def version(self) -> int | None:
        """The version that the copy holds; None when there is none that is whole."""
        path = self._local / "mirror.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State).version
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise PublicationError(
                f"{path} can't be read: {error}.", next_step="Delete it, and publish anew."
            ) from error

    def pull(self, source: Path, version: int) -> Path:
        """Bring the copy to `version`, published in `source`, and return its folder.

        Raises `PublicationError` when the published version is incomplete or damaged, when a delta's base is not what
        the copy holds, when a checksum differs, or when the copy is locked for longer than the timeout. The copy then
        holds its old version, or none; the message says so.
        """
        self._local.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._local / "mirror.lock", timeout=self._lock_timeout_s):
                if self.version != version:
                    self._update(version_folder(source, version), version)
        except Timeout as error:
            raise PublicationError(
                f"{self._local} is locked by another process for more than {self._lock_timeout_s:g} s.",
                next_step="Look for an engine of this host that is stuck.",
            ) from error
        except OSError as error:
            raise PublicationError(
                f"Version {version} can't be copied to {self._local}: {error}.",
                next_step="Check the space and the rights of --update-weight-local-checkpoint-dir.",
            ) from error
        return self.folder

    def _update(self, published: Path, version: int) -> None:
        index = read_index(published)
        if index.base is None:
            fresh = self._fetch(published, index)
            self._note(None)
            shutil.rmtree(self.folder, ignore_errors=True)
            fresh.rename(self.folder)
        else:
            held = self.version
            if held != index.base:
                raise PublicationError(
                    f"{published} changes version {index.base}, {self._local} holds {_named(held)}.",
                    next_step=_FULL_NEXT,
                )
            headers = {path: read_header(path) for path in sorted(self.folder.glob("*.safetensors"))}
            deltas = {name: read_header(published / name) for name in sorted(set(index.weight_map.values()))}
            self._check_known(published, index, headers, deltas)
            self._note(None)
            for name, delta in deltas.items():
                self._apply(published / name, delta, index, headers)
        self._note(version)

    def _fetch(self, published: Path, index: Index) -> Path:
        """Copy a whole version beside the present one, and check it."""
        fresh = self._local / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(published, fresh)
        for name in sorted(set(index.weight_map.values())):
            header, content = read_header(fresh / name), map_file(fresh / name)
            for tensor, place in header.tensors.items():
                _compare(fresh / name, tensor, header, checksum(content[place.start : place.stop], _kind(index)))
        return fresh

    def _check_known(
        self, published: Path, index: Index, held: dict[Path, FileHeader], deltas: dict[str, FileHeader]
    ) -> None:
        """Before anything is changed: every tensor of the delta is in it, and in the copy."""
        known = {tensor for header in held.values() for tensor in header.tensors}
        stored = {tensor for header in deltas.values() for tensor in header.tensors}
        if lost := sorted(set(index.weight_map) - stored):
            raise PublicationError(f"{published} lacks {len(lost)} tensors of its index, first {lost[0]}.")
        if unknown := sorted(stored - known):
            raise PublicationError(
                f"{published} changes {len(unknown)} tensors that {self.folder} doesn't have, first {unknown[0]}.",
                next_step=_FULL_NEXT,
            )

    def _apply(self, file: Path, delta: FileHeader, index: Index, held: dict[Path, FileHeader]) -> None:
        entries = map_file(file)
        for path, header in held.items():
            shared = [tensor for tensor in delta.tensors if tensor in header.tensors]
            if not shared:
                continue
            content = map_file(path, writable=True)
            for tensor in shared:
                place, entry = header.tensors[tensor], delta.tensors[tensor]
                state = content[place.start : place.stop]
                encoding = cast(Encoding, index.metadata.delta_encoding)
                try:
                    apply_change(entries[entry.start : entry.stop].tobytes(), state, encoding)
                except PublicationError as error:
                    raise PublicationError(f"{file}, tensor {tensor}: {error.message}", next_step=_FULL_NEXT) from error
                _compare(file, tensor, delta, checksum(state, _kind(index)))

    def _note(self, version: int | None) -> None:
        temporary = self._local / "mirror.json.tmp"
        temporary.write_bytes(msgspec.json.encode(_State(version)))
        temporary.replace(self._local / "mirror.json")


def _compare(file: Path, tensor: str, header: FileHeader, found: str) -> None:
    expected = header.metadata.get(tensor)
    if found != expected:
        raise PublicationError(
            f"{file}, tensor {tensor}: the checksum of the result is {found}, expected {expected}.",
            next_step=_FULL_NEXT,
        )


def _kind(index: Index) -> str:
    return index.metadata.checksum_format or ""


def _named(version: int | None) -> str:
    return "no whole version" if version is None else f"version {version}"
