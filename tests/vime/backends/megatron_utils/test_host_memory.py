"""Memory that leaves its device and comes back, and models that take turns."""

from __future__ import annotations

import torch

from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.host_memory import HostMemory


def test_every_bit_and_every_view_is_back_after_a_move() -> None:
    bucket = torch.randn(100)
    shard, row = bucket[20:60], bucket[20:60].view(4, 10)[1]
    pattern = torch.tensor([float("nan"), -0.0, float("inf")]).view(torch.int32)
    strange = pattern.clone().view(torch.float32)
    before, expected = bucket.clone(), row.clone()
    memory = HostMemory()
    freed = memory.move_out([shard, bucket, row, strange])
    assert freed == 4 * (100 + 3)
    assert [bucket.untyped_storage().nbytes(), strange.untyped_storage().nbytes()] == [0, 0]
    memory.move_in()
    assert torch.equal(bucket, before)
    assert torch.equal(row, expected)
    assert torch.equal(strange.view(torch.int32), pattern)
    bucket[31] = 7.0
    assert row[1] == 7.0, "views share the memory still"


def test_cleared_tensors_come_back_as_zeros_unless_they_share_memory_with_kept_ones() -> None:
    gradients, both = torch.ones(5), torch.ones(6)
    memory = HostMemory()
    memory.move_out([both[:3]], [gradients, both[3:]])
    memory.move_in()
    assert gradients.tolist() == [0.0] * 5
    assert both.tolist() == [1.0] * 6


def test_a_second_move_in_the_same_direction_does_nothing() -> None:
    value = torch.arange(4.0)
    memory = HostMemory()
    memory.move_in()
    assert memory.move_out([value]) == 16
    assert memory.move_out([value]) == 0
    memory.move_in()
    memory.move_in()
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_that_numpy_shares_stays_and_keeps_its_values() -> None:
    value = torch.arange(3.0)
    shared = value.numpy()
    memory = HostMemory()
    assert memory.move_out([value]) == 0
    memory.move_in()
    assert shared.tolist() == [0.0, 1.0, 2.0]


class Model:
    """Says where it is."""

    def __init__(self) -> None:
        self.is_in = True

    def move_out(self) -> int:
        freed, self.is_in = int(self.is_in), False
        return freed

    def move_in(self) -> None:
        self.is_in = True


def test_one_model_is_on_the_device_at_a_time() -> None:
    turns, first, second = DeviceTurns(), Model(), Model()
    turns.join(first)
    turns.join(second)
    assert (first.is_in, second.is_in) == (False, True)
    turns.take(first)
    assert (first.is_in, second.is_in) == (True, False)
    assert turns.rest() == 1
    assert (first.is_in, second.is_in) == (False, False)
