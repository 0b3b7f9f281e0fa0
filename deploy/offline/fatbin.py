"""GPU code of other architectures taken out of shared libraries.

Zeroed, not cut: offsets stay, so the library loads as before, and zeros compress to nothing. The layout of `.nv_fatbin`
is a row of containers, each a header of 16 bytes (magic, version, header size, body size) and entries, each a header
(kind, version, header size, payload size, ..., architecture at byte 28) and a payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_CONTAINER, _CONTAINER_MAGIC = struct.Struct("<IHHQ"), 0xBA55ED50
_ENTRY, _ENTRY_ARCH_AT, _ENTRY_MIN = struct.Struct("<HHIQ"), 28, 64
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True)
class GpuCode:
    """One entry: code for an architecture such as 90, as machine code or PTX."""

    kind: int
    arch: int
    start: int
    size: int


def keep_architecture(library: bytearray, arch: int, *, keep_ptx: bool) -> int:
    """Zero in place what a GPU of `arch` doesn't run; bytes zeroed.

    With `keep_ptx` a container without machine code for `arch` keeps its newest PTX that the driver can compile for it.
    Raises `ValueError` for a file that is no 64-bit ELF.
    """
    zeroed = 0
    for start, end in _fatbin_sections(library):
        for entries in _containers(library, start, end):
            for entry in set(entries) - set(_wanted(entries, arch, keep_ptx=keep_ptx)):
                library[entry.start : entry.start + entry.size] = bytes(entry.size)
                zeroed += entry.size
    return zeroed


def _wanted(entries: list[GpuCode], arch: int, *, keep_ptx: bool) -> list[GpuCode]:
    machine_code = [entry for entry in entries if entry.kind == _CUBIN and entry.arch == arch]
    if machine_code or not keep_ptx:
        return machine_code
    compilable = [entry for entry in entries if entry.kind == _PTX and entry.arch <= arch]
    return sorted(compilable, key=lambda entry: entry.arch)[-1:]


def _fatbin_sections(library: bytearray) -> Iterator[tuple[int, int]]:
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, table + number * entry_size) for number in range(count)]
    for name, _, _, _, offset, size, *_ in sections:
        at = sections[names][4] + name
        if bytes(library[at : library.index(0, at)]) in _SECTIONS:
            yield offset, offset + size


def _containers(library: bytearray, at: int, end: int) -> Iterator[list[GpuCode]]:
    while at + _CONTAINER.size <= end:
        magic, _, header_size, body_size = _CONTAINER.unpack_from(library, at)
        if magic != _CONTAINER_MAGIC:  # padding between containers
            at += 8
            continue
        body, at = at + header_size, at + header_size + body_size
        yield list(_entries(library, body, at))


def _entries(library: bytearray, at: int, end: int) -> Iterator[GpuCode]:
    while at + _ENTRY_MIN <= end:
        kind, _, header_size, size = _ENTRY.unpack_from(library, at)
        (arch,) = struct.unpack_from("<I", library, at + _ENTRY_ARCH_AT)
        yield GpuCode(kind, arch, at + header_size, size)
        at += header_size + size
