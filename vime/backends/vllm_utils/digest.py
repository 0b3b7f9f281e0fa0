"""The digests that both ends of a weight transfer compute, so that an engine can prove what it received.

`xxh3-128` is for bytes in host memory. `sum64` is a sum of 64-bit words, each times an odd number that depends on its
place, modulo 2^64: it runs where the weights are, so a GPU needs no copy of them. It finds accidents (lost, repeated,
exchanged or changed bytes), not forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
import xxhash

from vime.errors import PublicationError

DigestKind = Literal["xxh3-128", "sum64"]

WEIGHT_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Element types that a weight transfer carries, by the name that travels on the wire."""

_DTYPE_NAMES = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
_WORD = 8
_CHUNK_WORDS = 1 << 22
_STRIDE, _SPREAD = -7046029254386353131, -4658895280553007687


def dtype_name(tensor: torch.Tensor) -> str:
    """Wire name of the tensor's element type; `PublicationError` when the transfer can't carry it."""
    try:
        return _DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise PublicationError(
            f"Weights of type {tensor.dtype} can't be sent; allowed: {', '.join(WEIGHT_DTYPES)}.",
            next_step="Convert the tensor before publishing it.",
        ) from None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat uint8 tensor on its device, row-major; shares memory where it can."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digests(tensors: Sequence[torch.Tensor], kind: DigestKind) -> list[str]:
    """One hexadecimal digest of each tensor's bytes."""
    if kind == "xxh3-128":
        return [_xxh3(flat_bytes(tensor.detach().to("cpu"))) for tensor in tensors]
    sums = [_word_sum(flat_bytes(tensor)) for tensor in tensors]
    # One copy to the host for all of them.
    values = torch.stack(sums).tolist() if sums else []
    lengths = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [
        f"{(value + length * _SPREAD) & 0xFFFFFFFFFFFFFFFF:016x}" for value, length in zip(values, lengths, strict=True)
    ]


def _xxh3(data: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(memoryview(data.numpy()))  # type: ignore[arg-type]


def _word_sum(data: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the device of `data`, a flat uint8 tensor: the sum of its words, without its length.

    Few operations: a model has hundreds of tensors, and on a GPU the start of each operation is what takes time.
    """
    whole = data.numel() // _WORD * _WORD
    head = data[:whole]
    words = (head.clone() if head.storage_offset() % _WORD else head).view(torch.int64)
    first = words[:_CHUNK_WORDS]
    total = (first * _factors(data.device)[: first.numel()]).sum()
    for start in range(_CHUNK_WORDS, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        total = total + (part * _factors_from(start, part.numel(), data.device)).sum()
    if whole < data.numel():
        tail = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        total = total + tail.view(torch.int64).sum() * (2 * data.numel() + 1)
    return total


@functools.lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    """Those of the first words of every tensor, int64 [_CHUNK_WORDS]."""
    factors = _factors_from(0, _CHUNK_WORDS, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams will read them
    return factors


def _factors_from(start: int, count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(start, start + count, device=device) * _STRIDE
    return (places ^ (places >> 29)) * _SPREAD | 1


class WeightDigest:
    """Running digest over the name, element type, shape and bytes of every tensor, in the order they are added.

    Names and shapes are part of it: two equal tensors that change places change the digest.
    """

    def __init__(self, kind: DigestKind = "xxh3-128") -> None:
        self.kind = kind
        self._hash = xxhash.xxh3_128()
        self.num_tensors = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor, digest: str | None = None) -> None:
        """Add one tensor (any shape, element type of `WEIGHT_DTYPES`, any device).

        `digest` is that of its bytes, where it has been computed already.
        """
        if digest is None:
            (digest,) = tensor_digests([tensor], self.kind)
        shape = ",".join(map(str, tensor.shape))
        self._hash.update(f"{name}\0{dtype_name(tensor)}\0{shape}\0{digest}\n".encode())
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()

    def hexdigest(self) -> str:
        """The digest so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()
