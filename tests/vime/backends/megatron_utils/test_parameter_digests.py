"""Digests of parameters: equal bytes agree, one changed bit does not, and experts share one."""

from __future__ import annotations

import torch

from vime.backends.megatron_utils.parameter_digests import digests_of


def parameters() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    names = ("w", "m.local_experts.0.w", "m.local_experts.1.w", "m.local_experts.10.w")
    return {name: torch.randn(3, 5, generator=made) for name in names}


def test_equal_bytes_have_equal_digests_and_experts_share_one() -> None:
    found = digests_of(parameters())
    assert set(found) == {"w", "m.local_experts.*.w"}
    assert found == digests_of(dict(reversed(parameters().items())))


def test_one_bit_of_one_parameter_shows_in_its_digest_alone() -> None:
    changed = parameters()
    changed["m.local_experts.10.w"].view(torch.int32)[2, 4] ^= 1
    found, before = digests_of(changed), digests_of(parameters())
    assert [name for name in before if found[name] != before[name]] == ["m.local_experts.*.w"]
