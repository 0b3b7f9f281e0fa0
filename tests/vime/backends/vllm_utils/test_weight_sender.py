"""The sender against receivers in threads of the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vime.backends.vllm_utils.digest import DigestKind
from vime.backends.vllm_utils.packets import Packet
from vime.backends.vllm_utils.receiving import WeightReceiver, parse_group_init
from vime.backends.vllm_utils.sender import WeightSender
from vime.errors import PublicationError

WEIGHTS = [(f"layer.{i}", torch.randn(i + 1, 7)) for i in range(20)]


def join(sender: WeightSender, worker_rank: int) -> WeightReceiver:
    group = sender.init_info(rank_offset=1)["group"]
    assert isinstance(group, dict)
    return WeightReceiver(parse_group_init(group), worker_rank)


@pytest.mark.parametrize("digest", ["xxh3-128", "sum64"])
def test_all_workers_receive_every_publication(digest: DigestKind) -> None:
    with (
        WeightSender("127.0.0.1", 0, 3, timeout_s=10.0, packet_bytes=300, digest=digest) as sender,
        ThreadPoolExecutor(3) as pool,
    ):
        joining = [pool.submit(join, sender, rank) for rank in range(2)]
        sender.connect()
        receivers = [future.result() for future in joining]
        for scale in (1.0, 2.0):
            weights = [(name, tensor * scale) for name, tensor in WEIGHTS]
            receiving = [pool.submit(receiver.receive) for receiver in receivers]
            receipt = sender.send(iter(weights))
            for future in receiving:
                assert all(torch.equal(a[1], b[1]) for a, b in zip(future.result(), weights, strict=True))
            assert receipt.names == [name for name, _ in WEIGHTS]
            assert receipt.num_bytes == sum(tensor.nbytes for _, tensor in WEIGHTS)


def test_a_repeated_tensor_never_reaches_the_model() -> None:
    with WeightSender("127.0.0.1", 0, 2, timeout_s=10.0) as sender, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, sender, 0)
        sender.connect()
        receiving = pool.submit(joining.result().receive)
        with pytest.raises(PublicationError, match=r"layer\.3 comes twice"):
            sender.send([*WEIGHTS, WEIGHTS[3]])
        with pytest.raises(PublicationError, match="sender gave up"):
            receiving.result()
        assert not sender.broken


def test_an_engine_that_never_joins_is_named_in_bounded_time() -> None:
    names = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    with WeightSender("127.0.0.1", 0, 3, engine_names=names, timeout_s=0.5) as sender, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, sender, 0)
        started = time.monotonic()
        with pytest.raises(PublicationError, match=r"^http://10.0.0.2:8000 did not join the weight transfer"):
            sender.connect()
        assert time.monotonic() - started < 5.0
        assert joining.exception() is not None


def test_an_engine_that_does_not_receive_is_named_in_bounded_time() -> None:
    with WeightSender("127.0.0.1", 0, 2, engine_names=["http://10.0.0.1:8000"], timeout_s=0.5) as sender:
        thread = threading.Thread(target=join, args=(sender, 0))
        thread.start()
        sender.connect()
        thread.join()
        with pytest.raises(PublicationError, match=r"^http://10.0.0.1:8000 did not start receiving"):
            sender.send(WEIGHTS)
        assert sender.broken
        with pytest.raises(PublicationError, match="broken by an earlier failure"):
            sender.send(WEIGHTS)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PublicationError, match=r"can't listen on 192\.0\.2\.1"):
        WeightSender("192.0.2.1", 0, 2, timeout_s=0.5)


def test_weights_are_gathered_while_those_before_are_on_their_way() -> None:
    asked: list[tuple[str, int]] = []

    class Slow(WeightSender):
        def _flush(self) -> None:
            if self._pending is not None:
                asked.append(("sent", len(asked)))
            super()._flush()

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS[:3]:
            asked.append((name, len(asked)))
            yield name, tensor

    with Slow("127.0.0.1", 0, 2, timeout_s=10.0, packet_bytes=1) as sender, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, sender, 0)
        sender.connect()
        receiving = pool.submit(joining.result().receive)
        sender.send(gathering())
        receiving.result()
    order = [what for what, _ in asked]
    assert order.index("layer.2") < order.index("sent"), "the next packet is gathered before the first is waited for"


def test_a_reader_that_gives_up_leaves_the_group_in_step() -> None:
    with WeightSender("127.0.0.1", 0, 2, timeout_s=10.0, packet_bytes=300) as sender, ThreadPoolExecutor(2) as pool:
        joining = pool.submit(join, sender, 0)
        sender.connect()
        receiver = joining.result()

        def read_one_part() -> None:
            parts = receiver.stream()
            next(parts)
            parts.close()

        reading = pool.submit(read_one_part)
        with pytest.raises(PublicationError, match=r"Weights were refused by .*: the engine gave up"):
            sender.send(WEIGHTS)
        reading.result()
        receiving = pool.submit(receiver.receive)
        sender.send(WEIGHTS)
        assert len(receiving.result()) == len(WEIGHTS)


def test_an_engine_that_refuses_is_named_with_its_reason() -> None:
    class Damaging(WeightSender):
        def _encode(self, tensors: list[tuple[str, torch.Tensor]], digests: Sequence[str]) -> Packet:
            return super()._encode(tensors, ["0" * 32 for _ in digests])

    names = ["http://10.0.0.1:8000"]
    with Damaging("127.0.0.1", 0, 2, engine_names=names, timeout_s=10.0) as sender, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, sender, 0)
        sender.connect()
        receiving = pool.submit(joining.result().receive)
        with pytest.raises(PublicationError, match=r"refused by http://10\.0\.0\.1:8000: Tensor layer\.0 arrived with"):
            sender.send(WEIGHTS)
        assert isinstance(receiving.exception(), PublicationError)
        assert not sender.broken
