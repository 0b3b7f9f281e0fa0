"""Settings on their way to an actor."""

from __future__ import annotations

import msgspec

from vime.settings.groups import Settings


def encode_settings(settings: Settings) -> bytes:
    return msgspec.msgpack.encode(settings)


def decode_settings(content: bytes) -> Settings:
    return msgspec.msgpack.decode(content, type=Settings)
