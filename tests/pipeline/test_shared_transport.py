"""Weights in shared GPU memory: when the buffer is another one."""

from __future__ import annotations

from pipeline.weight_transports.shared import SharedTransport
from pipeline.weight_transports.transport import Deadline


class Source:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.num_stops = 0

    async def share_next_part(self, version: int) -> dict[str, object] | None:  # noqa: ARG002
        return None

    async def stop_sharing(self) -> None:
        self.num_stops += 1


async def test_engines_that_may_be_new_get_a_new_buffer_and_others_keep_theirs() -> None:
    source = Source()
    transport = SharedTransport(source)
    await transport.prepare(1, [], full=False, deadline=Deadline(5.0))
    assert source.num_stops == 0
    await transport.prepare(2, [], full=True, deadline=Deadline(5.0))
    assert source.num_stops == 1
