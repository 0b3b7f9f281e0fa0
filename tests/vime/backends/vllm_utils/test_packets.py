"""Packets of a weight transfer, and their digest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.backends.vllm_utils.digest import WEIGHT_DTYPES, DigestKind, WeightDigest, tensor_digests
from vime.backends.vllm_utils.packets import Packet, collect_packets, decode_tensors, encode_tensors
from vime.backends.vllm_utils.receipt import ReceiptBuilder
from vime.errors import PublicationError

KINDS: list[DigestKind] = ["xxh3-128", "sum64"]


def weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed", torch.randn(5, 3)),
        ("scalar", torch.tensor(2.0, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("turned", torch.randn(4, 6, dtype=torch.float16).T),
        ("whole", torch.arange(7)),
    ]


def encoded(tensors: list[tuple[str, torch.Tensor]], kind: DigestKind = "xxh3-128") -> Packet:
    return encode_tensors(tensors, tensor_digests([tensor for _, tensor in tensors], kind))


def digest(tensors: list[tuple[str, torch.Tensor]], kind: DigestKind = "xxh3-128") -> str:
    running = WeightDigest(kind)
    for name, tensor in tensors:
        running.add(name, tensor)
    return running.hexdigest()


def test_a_packet_returns_every_tensor_bit_for_bit() -> None:
    decoded = decode_tensors(encoded(weights()))
    assert [name for name, _ in decoded] == [name for name, _ in weights()]
    sent = weights()
    received = decode_tensors(encoded(sent))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(sent, received, strict=True))
    assert digest(sent) == digest(received)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WEIGHT_DTYPES)), st.lists(st.integers(0, 5), max_size=3)), max_size=6),
    st.integers(1, 200),
)
def test_packets_keep_order_and_values_whatever_their_size(
    shapes: list[tuple[str, list[int]]], packet_bytes: int
) -> None:
    sent = [(f"t{i}", torch.randint(0, 100, shape).to(WEIGHT_DTYPES[dtype])) for i, (dtype, shape) in enumerate(shapes)]
    packets = [encoded(group) for group in collect_packets(sent, packet_bytes)]
    received = [item for packet in packets for item in decode_tensors(packet)]
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert digest(received) == digest(sent)


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_sees_values_names_types_shapes_and_order(kind: DigestKind) -> None:
    one, two = torch.ones(2, 3), torch.zeros(2, 3)
    sets = [
        [("a", one), ("b", two)],
        [("b", two), ("a", one)],
        [("b", one), ("a", two)],
        [("a", one.reshape(3, 2)), ("b", two)],
        [("a", one), ("b", two.view(torch.int32))],
        [("a", one)],
    ]
    assert len({digest(tensors, kind) for tensors in sets}) == 6


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.data())
def test_the_sum_of_words_sees_every_changed_exchanged_or_missing_byte(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    place, other = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    changed, exchanged = tensor.clone(), tensor.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    exchanged[place], exchanged[other] = tensor[other], tensor[place]
    (found, of_changed, of_exchanged, of_short) = tensor_digests([tensor, changed, exchanged, tensor[:-1]], "sum64")
    assert of_changed != found != of_short
    assert (of_exchanged == found) == (values[place] == values[other])


def test_the_sum_of_words_does_not_depend_on_where_in_memory_the_bytes_lie() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    assert tensor_digests([memory[3:90]], "sum64") == tensor_digests([memory[3:90].clone()], "sum64")


@pytest.mark.parametrize("kind", KINDS)
def test_a_packet_whose_bytes_have_changed_is_refused_naming_the_tensor(kind: DigestKind) -> None:
    packet = encoded(weights(), kind)
    packet.payload[packet.meta_bytes + 5] ^= 1
    with pytest.raises(PublicationError, match=r"Tensor embed arrived with digest \w+, sent was \w+"):
        decode_tensors(packet, kind)


def test_a_packet_with_too_few_bytes_is_refused() -> None:
    packet = encoded(weights())
    short = type(packet)(packet.kind, packet.meta_bytes, packet.payload[:-16])
    with pytest.raises(PublicationError, match="Tensor whole needs 56 bytes"):
        decode_tensors(short)


def test_a_name_that_comes_twice_is_refused() -> None:
    receipt = ReceiptBuilder()
    receipt.add("a", torch.ones(1))
    with pytest.raises(PublicationError, match="Tensor a comes twice"):
        receipt.add("a", torch.ones(1))


def test_an_element_type_that_cannot_travel_is_named() -> None:
    with pytest.raises(PublicationError, match=r"torch\.complex64 can't be sent; allowed: float32"):
        WeightDigest().add("a", torch.ones(1, dtype=torch.complex64))
