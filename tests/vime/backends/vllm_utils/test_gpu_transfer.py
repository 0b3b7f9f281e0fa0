"""Weights between GPUs: a group over NCCL, and memory that two processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import msgspec
import pytest
import torch

from vime.backends.vllm_utils.digest import tensor_digests
from vime.backends.vllm_utils.gpu_share import SharedBuffers, SharingBuffer
from vime.backends.vllm_utils.receiving import NamedTensors, WeightReceiver, parse_group_init
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.updates import LoadShared
from vime.errors import PublicationError

pytestmark = pytest.mark.gpu
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def weights(device: torch.device, scale: float = 1.0) -> NamedTensors:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (1000, 333), (7,), (2, 2, 2), (0, 4)]
    made = [torch.randn(shape, generator=generator).mul(scale).to(torch.bfloat16) for shape in shapes]
    return [(f"layer.{number}", tensor.to(device)) for number, tensor in enumerate(made)]


@needs_two_gpus
def test_every_publication_over_nccl_arrives_whole_on_the_other_gpu() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    torch.cuda.set_device(first)
    with (
        WeightSender("127.0.0.1", 0, 2, timeout_s=60.0, packet_bytes=1 << 12, backend="nccl") as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        group = sender.init_info(1)["group"]
        assert isinstance(group, dict)

        def join() -> WeightReceiver:
            torch.cuda.set_device(second)
            return WeightReceiver(parse_group_init(group), 0, second)

        joining = pool.submit(join)
        sender.connect()
        receiver = joining.result()
        for scale in (1.0, 2.0):
            sent = weights(first, scale)
            receiving = pool.submit(receiver.receive)
            sender.send(sent)
            received = receiving.result()
            assert [name for name, _ in received] == [name for name, _ in sent]
            assert all(tensor.device == second for _, tensor in received)
            assert all(torch.equal(a.cpu(), b.cpu()) for (_, a), (_, b) in zip(received, sent, strict=True))


READER = """
import json, sys
import msgspec, torch
from vime.backends.vllm_utils.digest import tensor_digests
from vime.backends.vllm_utils.gpu_share import SharedBuffers
from vime.backends.vllm_utils.updates import LoadShared

buffers = SharedBuffers()
for line in sys.stdin:
    part = buffers.part(msgspec.convert(json.loads(line), LoadShared), torch.device("cuda", 0))
    print(json.dumps([[name, digest] for (name, tensor), digest in
                      zip(part, tensor_digests([tensor for _, tensor in part], "sum64"))]), flush=True)
"""


class Reader:
    """A process that reads parts."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", READER], stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def reads(self, buffer: SharingBuffer, scale: float) -> None:
        """Hand over a part and compare."""
        part = weights(torch.device("cuda", 0), scale)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(buffer.fill(1, part, first=True, last=True)) + "\n")
        self._process.stdin.flush()
        digests = tensor_digests([tensor for _, tensor in part], "sum64")
        expected = [[name, digest] for (name, _), digest in zip(part, digests, strict=True)]
        assert json.loads(self._process.stdout.readline()) == expected


def test_another_process_reads_every_part_from_shared_memory() -> None:
    buffer = SharingBuffer(1 << 21, torch.device("cuda", 0))
    with Reader() as reader:
        for scale in (1.0, 2.0):
            reader.reads(buffer, scale)


def test_new_buffer_is_read_by_the_process_that_follows_one_that_was_killed() -> None:
    device = torch.device("cuda", 0)
    with Reader() as killed:
        killed.reads(SharingBuffer(1 << 21, device), 1.0)
    with Reader() as follower:
        follower.reads(SharingBuffer(1 << 21, device), 2.0)


def test_a_part_larger_than_the_buffer_and_a_gpu_that_is_not_there_are_told() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(PublicationError, match="the shared buffer 1024"):
        SharingBuffer(1024, device).fill(1, weights(device), first=True, last=True)
    content = SharingBuffer(1 << 21, device).fill(1, weights(device), first=True, last=True)
    moved = msgspec.structs.replace(msgspec.convert(content, LoadShared), handles={"elsewhere": ""})
    with pytest.raises(PublicationError, match="The weights are on GPU elsewhere, this engine sees"):
        SharedBuffers().part(moved, device)


def test_both_kinds_of_memory_give_the_same_sum_of_words() -> None:
    on_host = [tensor for _, tensor in weights(torch.device("cpu"))]
    on_gpu = [tensor for _, tensor in weights(torch.device("cuda", 0))]
    assert tensor_digests(on_host, "sum64") == tensor_digests(on_gpu, "sum64")
