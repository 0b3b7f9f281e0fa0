"""The digest that both ends of a weight transfer compute, so that an engine can prove what it received."""

from __future__ import annotations

import torch
import xxhash

from vime.errors import PublicationError

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
    """The tensor's elements as a flat uint8 tensor in host memory, row-major; shares memory where it can."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


class WeightDigest:
    """Running xxh3-128 over the name, element type, shape and bytes of every tensor, in the order they are added.

    Names and shapes are part of it: two equal tensors that change places change the digest.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.num_tensors = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor (any shape, any element type of `WEIGHT_DTYPES`, any device)."""
        data = flat_bytes(tensor)
        shape = ",".join(map(str, tensor.shape))
        self._hash.update(f"{name}\0{dtype_name(tensor)}\0{shape}\n".encode())
        self._hash.update(memoryview(data.numpy()))  # type: ignore[arg-type]
        self.num_tensors += 1
        self.num_bytes += data.numel()

    def hexdigest(self) -> str:
        """The digest so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()
