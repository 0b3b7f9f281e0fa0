"""What a sender has sent; what an engine must be able to confirm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vime.backends.vllm_utils.digest import DigestKind, WeightDigest, tensor_digests
from vime.errors import PublicationError


@dataclass(frozen=True)
class SendReceipt:
    """Names in the order sent, and the digest of all tensors."""

    names: list[str]
    digest: str
    num_bytes: int


@dataclass
class ReceiptBuilder:
    """Builds a receipt tensor by tensor; refuses a name that comes twice."""

    kind: DigestKind = "xxh3-128"
    names: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._digest = WeightDigest(self.kind)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record one tensor; raises `PublicationError` for a repeated name."""
        self.add_all([(name, tensor)])

    def add_all(
        self, tensors: Sequence[tuple[str, torch.Tensor]], digests: Sequence[str] | None = None
    ) -> Sequence[str]:
        """Record tensors; the digest of each, computed unless given.

        Raises `PublicationError` for a repeated name.
        """
        if digests is None:
            digests = tensor_digests([tensor for _, tensor in tensors], self.kind)
        for (name, tensor), digest in zip(tensors, digests, strict=True):
            if name in self._seen:
                raise PublicationError(f"Tensor {name} comes twice in one publication; allowed: once.")
            self._seen.add(name)
            self.names.append(name)
            self._digest.add(name, tensor, digest)
        return digests

    def build(self) -> SendReceipt:
        """The receipt of everything added so far."""
        return SendReceipt(self.names, self._digest.hexdigest(), self._digest.num_bytes)
