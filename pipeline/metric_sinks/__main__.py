"""A sink's process. It reads its configuration and then points, one JSON line each, from its standard input.

It ends with the input, whoever ends that. Why it failed is all that it ever writes to its standard output.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO, Protocol, TextIO

import msgspec

from pipeline.metric_sinks.configs import SinkConfig, TensorBoardConfig
from pipeline.metric_sinks.point import Point


class Sink(Protocol):
    """Where points go. Any method may raise."""

    def write(self, point: Point) -> None: ...
    def close(self) -> None: ...


def open_sink(config: SinkConfig) -> Sink:
    """The sink, whose library only its own process imports."""
    if isinstance(config, TensorBoardConfig):
        from pipeline.metric_sinks.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(config)
    from pipeline.metric_sinks.wandb_sink import WandbSink

    return WandbSink(config)


def take_pipes() -> tuple[BinaryIO, TextIO]:
    """Input and output, which processes that a library starts don't inherit; what libraries print goes to the log."""
    lines = os.fdopen(os.dup(0), "rb")
    status = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return lines, status


def main() -> int:
    """Copy points until the input ends; 1 when the sink failed."""
    lines, status = take_pipes()
    try:
        sink = open_sink(msgspec.json.decode(lines.readline(), type=SinkConfig))
        for line in lines:
            sink.write(msgspec.json.decode(line, type=Point))
        sink.close()
    except Exception as error:  # the boundary to other people's libraries: the run is told, and goes on
        status.write(" ".join(f"{type(error).__name__}: {error}".split()))
        status.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
