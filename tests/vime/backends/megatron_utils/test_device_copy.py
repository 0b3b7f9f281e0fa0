"""Copies to the training device."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.device_copy import to_device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_has_the_values_of_the_host(device: str) -> None:
    values = torch.arange(1000)
    assert torch.equal(to_device(values, torch.device(device)).cpu(), values)


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_work_before_it() -> None:
    values = torch.arange(1 << 20)
    to_device(values, torch.device("cuda"))  # pins memory, which waits
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    before.record()
    to_device(values, torch.device("cuda"))
    assert not before.query()
