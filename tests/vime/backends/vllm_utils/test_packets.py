"""Packets of a weight transfer, their digest, and weights in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vime.backends.vllm_utils.digest import WEIGHT_DTYPES, WeightDigest
from vime.backends.vllm_utils.packets import collect_packets, decode_tensors, encode_tensors
from vime.backends.vllm_utils.receipt import ReceiptBuilder
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder, write_weight_folder
from vime.errors import PublicationError


def weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed", torch.randn(5, 3)),
        ("scalar", torch.tensor(2.0, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("turned", torch.randn(4, 6, dtype=torch.float16).T),
        ("whole", torch.arange(7)),
    ]


def digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    running = WeightDigest()
    for name, tensor in tensors:
        running.add(name, tensor)
    return running.hexdigest()


def test_a_packet_returns_every_tensor_bit_for_bit() -> None:
    decoded = decode_tensors(encode_tensors(weights()))
    assert [name for name, _ in decoded] == [name for name, _ in weights()]
    sent = weights()
    received = decode_tensors(encode_tensors(sent))
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
    packets = [encode_tensors(group) for group in collect_packets(sent, packet_bytes)]
    received = [item for packet in packets for item in decode_tensors(packet)]
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert digest(received) == digest(sent)


def test_the_digest_sees_values_names_types_shapes_and_order() -> None:
    one, two = torch.ones(2, 3), torch.zeros(2, 3)
    digests = {
        digest([("a", one), ("b", two)]),
        digest([("b", two), ("a", one)]),
        digest([("b", one), ("a", two)]),
        digest([("a", one.reshape(3, 2)), ("b", two)]),
        digest([("a", one), ("b", two.view(torch.int32))]),
        digest([("a", one)]),
    }
    assert len(digests) == 6


def test_a_packet_with_too_few_bytes_is_refused() -> None:
    packet = encode_tensors(weights())
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


class TestFolder:
    def test_a_written_folder_verifies_and_reads_back_in_order(self, tmp_path: Path) -> None:
        sent = weights()
        receipt = write_weight_folder(sent, tmp_path / "v1", file_bytes=64)
        assert len(list((tmp_path / "v1").glob("*.safetensors"))) > 1
        verify_weight_folder(tmp_path / "v1", receipt.names, receipt.digest)
        received = list(read_weight_folder(tmp_path / "v1", receipt.names))
        assert digest(received) == digest(sent) == receipt.digest

    def test_a_changed_value_is_found(self, tmp_path: Path) -> None:
        receipt = write_weight_folder(weights(), tmp_path / "v1")
        file = tmp_path / "v1" / "model-00001.safetensors"
        tensors = load_file(file)
        tensors["embed"][0, 0] += 1
        save_file(tensors, file)
        with pytest.raises(PublicationError, match=r"has digest .*, expected"):
            verify_weight_folder(tmp_path / "v1", receipt.names, receipt.digest)

    def test_missing_and_extra_tensors_are_named(self, tmp_path: Path) -> None:
        receipt = write_weight_folder(weights(), tmp_path / "v1")
        with pytest.raises(PublicationError, match=r"missing tensors \['other'\], unexpected tensors \['whole'\]"):
            verify_weight_folder(tmp_path / "v1", [*receipt.names[:-1], "other"], receipt.digest)

    def test_an_unreadable_or_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PublicationError, match=r"holds no \*\.safetensors files"):
            verify_weight_folder(tmp_path, [], "")
        (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
        with pytest.raises(PublicationError, match="can't be read"):
            verify_weight_folder(tmp_path, ["a"], "")

    def test_an_existing_folder_is_never_written_over(self, tmp_path: Path) -> None:
        with pytest.raises(PublicationError, match="can't be written"):
            write_weight_folder(weights(), tmp_path)
