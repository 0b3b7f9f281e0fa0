"""What a rank's parameters are, in a few bytes each, so that two trainings can be compared bit by bit."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import xxhash

from vime.backends.vllm_utils.digest import tensor_digests

_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_DIGITS = 16


def digests_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> hexadecimal digest of the parameter's bytes, where the parameter lies: a GPU copies none to the host.

    The experts of one layer share a digest, under a name with `*` for their number.
    """
    names = sorted(parameters)
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
    found = tensor_digests([parameters[name] for name in names], "xxh3-128" if on_cpu else "sum64")
    grouped: dict[str, list[str]] = {}
    for name, digest in zip(names, found, strict=True):
        grouped.setdefault(_EXPERT.sub(".local_experts.*.", name), []).append(digest)
    return {
        name: own[0][:_DIGITS] if len(own) == 1 else xxhash.xxh3_64_hexdigest("".join(own).encode())
        for name, own in grouped.items()
    }
