"""What a sender has sent; what an engine must be able to confirm."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vime.backends.vllm_utils.digest import WeightDigest, dtype_name
from vime.errors import PublicationError


@dataclass(frozen=True)
class SendReceipt:
    """Names, shapes and element types in the order sent, and the digest of all of it with the bytes."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    digest: str
    num_bytes: int

    def expectation(self) -> dict[str, object]:
        """The part that an engine checks: `names` and `digest`, ready for an update request."""
        return {"names": self.names, "digest": self.digest}


@dataclass
class ReceiptBuilder:
    """Builds a receipt tensor by tensor; refuses a name that comes twice."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    _digest: WeightDigest = field(default_factory=WeightDigest)
    _seen: set[str] = field(default_factory=set)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record one tensor; raises `PublicationError` for a repeated name."""
        if name in self._seen:
            raise PublicationError(f"Tensor {name} comes twice in one publication; allowed: once.")
        self._seen.add(name)
        self.names.append(name)
        self.shapes.append(tuple(tensor.shape))
        self.dtypes.append(dtype_name(tensor))
        self._digest.add(name, tensor)

    def build(self) -> SendReceipt:
        """The receipt of everything added so far."""
        return SendReceipt(self.names, self.shapes, self.dtypes, self._digest.hexdigest(), self._digest.num_bytes)
