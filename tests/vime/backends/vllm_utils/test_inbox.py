"""A version that comes to an engine in parts, and one whose load was arranged while it was staged."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch

from vime.backends.vllm_utils.inbox import WeightInbox
from vime.backends.vllm_utils.receiving import NamedTensors
from vime.backends.vllm_utils.updates import FromShared, StageStatus
from vime.errors import PublicationError

CPU = torch.device("cpu")


class Shared:
    """Each part is one tensor; a damaged one is refused."""

    def __init__(self) -> None:
        self.is_damaged = False
        self.given: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def part(self, update: FromShared, device: torch.device) -> NamedTensors:
        tensor = torch.full((2,), float(update.num_bytes), device=device)
        self.given.add(tensor)
        if self.is_damaged:
            raise PublicationError("Tensor w arrived with digest 1, sent was 2.") from RuntimeError("w")
        return [(f"w{update.num_bytes}", tensor)]


def part(number: int, *, num_parts: int = 3, version: int = 7) -> FromShared:
    return FromShared(version, {}, 0, number, first=number == 0, last=number == num_parts - 1)


def staged(inbox: WeightInbox, request: FromShared) -> StageStatus:
    inbox.stage(request)
    deadline = time.monotonic() + 10
    while inbox.status().state == "running" and time.monotonic() < deadline:
        time.sleep(0.001)
    return inbox.status()


def test_parts_make_a_version_that_is_taken_whole() -> None:
    inbox = WeightInbox(0, CPU, shared=Shared())
    assert [staged(inbox, part(number)).state for number in range(3)] == ["staged"] * 3
    assert [(name, tensor.tolist()) for name, tensor in inbox.take(7)] == [
        ("w0", [0.0, 0.0]),
        ("w1", [1.0, 1.0]),
        ("w2", [2.0, 2.0]),
    ]
    with pytest.raises(PublicationError, match="nothing was staged"):
        inbox.take(7)


def test_a_version_without_its_last_part_is_not_taken() -> None:
    inbox = WeightInbox(0, CPU, shared=Shared())
    staged(inbox, part(0))
    with pytest.raises(PublicationError, match="parts of it have not come"):
        inbox.take(7)


def test_a_version_that_begins_anew_has_nothing_of_the_one_before() -> None:
    inbox = WeightInbox(0, CPU, shared=Shared())
    staged(inbox, part(0))
    staged(inbox, part(0, num_parts=1, version=8))
    assert [name for name, _ in inbox.take(8)] == ["w0"]


def test_a_damaged_part_is_refused() -> None:
    shared = Shared()
    inbox = WeightInbox(0, CPU, shared=shared)
    staged(inbox, part(0))
    shared.is_damaged = True
    status = staged(inbox, part(1))
    assert (status.state, status.reason) == ("failed", "Tensor w arrived with digest 1, sent was 2.")


def test_what_failed_keeps_no_memory_from_a_version_that_comes_another_way() -> None:
    shared = Shared()
    inbox = WeightInbox(0, CPU, shared=shared)
    staged(inbox, part(0))
    shared.is_damaged = True
    staged(inbox, part(1))
    assert len(shared.given) == 1, "the error holds nothing of the part that it refuses"
    inbox.clear()
    assert len(shared.given) == 0, "the parts before are let go"
    with pytest.raises(PublicationError, match="nothing was staged"):
        inbox.take(7)


def test_an_engine_without_a_gpu_says_that_it_shares_nothing() -> None:
    status = staged(WeightInbox(0), part(0))
    assert (status.state, status.reason) == ("failed", "This engine has no GPU whose memory it could share.")


def test_a_load_is_arranged_with_all_tensors_while_they_are_staged() -> None:
    arranged: list[Any] = []

    def arrange(tensors: NamedTensors) -> Any:
        arranged.append([name for name, _ in tensors])
        return lambda: arranged.append("loaded")

    inbox = WeightInbox(0, CPU, shared=Shared(), arrange=arrange)
    for number in range(3):
        staged(inbox, part(number))
    assert arranged == [["w0", "w1", "w2"]]
    load = inbox.take(7).load
    assert load is not None
    load()
    assert arranged[-1] == "loaded"
