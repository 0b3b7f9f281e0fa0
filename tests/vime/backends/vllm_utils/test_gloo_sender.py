"""The sender against receivers in threads of the same process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vime.backends.vllm_utils.receiving import GlooReceiver, parse_gloo_init
from vime.backends.vllm_utils.sender import GlooSender
from vime.errors import PublicationError

WEIGHTS = [(f"layer.{i}", torch.randn(i + 1, 7)) for i in range(20)]


def join(sender: GlooSender, worker_rank: int) -> GlooReceiver:
    gloo = sender.init_info(rank_offset=1)["gloo"]
    assert isinstance(gloo, dict)
    return GlooReceiver(parse_gloo_init(gloo), worker_rank)


def test_all_workers_receive_every_publication() -> None:
    with GlooSender("127.0.0.1", 0, 3, timeout_s=10.0, packet_bytes=300) as sender, ThreadPoolExecutor(3) as pool:
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
    with GlooSender("127.0.0.1", 0, 2, timeout_s=10.0) as sender, ThreadPoolExecutor(1) as pool:
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
    with GlooSender("127.0.0.1", 0, 3, engine_names=names, timeout_s=0.5) as sender, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, sender, 0)
        started = time.monotonic()
        with pytest.raises(PublicationError, match=r"^http://10.0.0.2:8000 did not join the weight transfer"):
            sender.connect()
        assert time.monotonic() - started < 5.0
        assert joining.exception() is not None


def test_an_engine_that_does_not_receive_is_named_in_bounded_time() -> None:
    with GlooSender("127.0.0.1", 0, 2, engine_names=["http://10.0.0.1:8000"], timeout_s=0.5) as sender:
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
        GlooSender("192.0.2.1", 0, 2, timeout_s=0.5)
