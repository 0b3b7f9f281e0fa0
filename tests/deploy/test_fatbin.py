"""GPU code of other architectures leaves a library, and nothing else does."""

from __future__ import annotations

import struct

import pytest

from deploy.offline.fatbin import keep_architecture

PTX, CUBIN = 1, 2


def container(*entries: tuple[int, int, bytes]) -> bytes:
    body = b""
    for kind, arch, payload in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", arch)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*containers: bytes) -> bytearray:
    """A 64-bit ELF file with sections for names, other data, and GPU code with 8 bytes of padding in it."""
    names, other, code = b"\0.shstrtab\0.data\0.nv_fatbin\0", b"D" * 40, (b"\0" * 8).join(containers)
    offsets = [64, 64 + len(names), 64 + len(names) + len(other)]
    table = b""
    for name, offset, content in zip((1, 11, 17), offsets, (names, other, code), strict=True):
        table += struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, offset, len(content), 0, 0, 0, 0)
    start = offsets[2] + len(code)
    header = bytearray(b"\x7fELF\x02".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 0x28, start)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 0)
    return header + names + other + code + table


def test_only_code_of_the_architecture_stays() -> None:
    found = library(container((CUBIN, 80, b"A" * 32), (CUBIN, 90, b"B" * 32)), container((CUBIN, 100, b"C" * 16)))
    wanted = bytearray(bytes(found).replace(b"A" * 32, bytes(32)).replace(b"C" * 16, bytes(16)))
    assert keep_architecture(found, 90, keep_ptx=False) == 48
    assert found == wanted


def test_newest_code_that_can_be_compiled_stands_in_where_there_is_no_other() -> None:
    found = library(
        container((PTX, 70, b"A" * 8), (PTX, 80, b"B" * 8), (PTX, 100, b"C" * 8)),
        container((PTX, 80, b"D" * 8), (CUBIN, 90, b"E" * 8)),
    )
    keep_architecture(found, 90, keep_ptx=True)
    assert [letter for letter in b"ABCDE" if bytes([letter]) * 8 in found and letter != ord("D")] == list(b"BE")
    assert found.count(b"D") == 40


def test_file_that_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        keep_architecture(bytearray(b"hello" * 100), 90, keep_ptx=False)
