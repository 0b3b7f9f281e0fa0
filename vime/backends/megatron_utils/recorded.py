"""What the sampler recorded beside each token, as the output head reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.backends.megatron_utils.device_copy import to_device
from vime.backends.megatron_utils.head.types import Nucleus, TopKCandidates
from vime.data.batch import PackedMicrobatch
from vime.errors import TrainerError


def recorded_tensors(
    microbatch: PackedMicrobatch, device: torch.device, own: npt.NDArray[np.bool_]
) -> tuple[TopKCandidates | None, Nucleus | None]:
    """Candidates and nucleus of the `own` ones [R] of a microbatch's response tokens on `device`.

    None for what the microbatch doesn't have.
    """

    def move(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(array, dtype=dtype), device)

    candidates, nucleus = None, None
    if (top_k := microbatch.top_k) is not None:
        candidates = TopKCandidates(move(top_k.ids[own], torch.int32), move(top_k.log_probs[own], torch.float32))
    if (rows := microbatch.nucleus) is not None:
        lengths = np.diff(rows.offsets)
        entries = np.repeat(own, lengths)
        log_probs = None if rows.log_probs is None else move(rows.log_probs[entries], torch.float32)
        offsets = np.cumsum([0, *lengths[own]])
        nucleus = Nucleus(move(rows.ids[entries], torch.int32), move(offsets, torch.int64), log_probs)
    return candidates, nucleus


def check_recorded(microbatch: PackedMicrobatch) -> None:
    """Raise `TrainerError` where score centering has nothing to sum over.

    Either every response token has candidates, or every trained one has a nucleus with log-probabilities that holds
    the token itself.
    """
    nucleus = microbatch.nucleus
    if microbatch.top_k is None and (nucleus is None or nucleus.log_probs is None):
        raise TrainerError(
            f"samples {_listed(microbatch)} have neither candidates nor a nucleus with log-probabilities, "
            "which score centering needs.",
            next_step="Generate them with --use-score-centering, or train without it.",
        )
    if nucleus is None:
        return
    targets = _response_tokens(microbatch)
    rows = np.repeat(np.arange(len(targets)), np.diff(nucleus.offsets))
    holds_target = np.zeros(len(targets), bool)
    holds_target[rows[nucleus.ids == targets[rows]]] = True
    bad = np.flatnonzero((microbatch.loss_mask != 0) & ~holds_target)
    if not len(bad):
        return
    row = int(bad[0])
    sequence = int(np.searchsorted(np.cumsum(microbatch.response_lengths), row, side="right"))
    recorded = nucleus.ids[nucleus.offsets[row] : nucleus.offsets[row + 1]]
    raise TrainerError(
        f"sample {int(microbatch.sample_indices[sequence])}: the recorded nucleus of the trained token "
        f"{int(targets[row])} holds {recorded[:8].tolist()}{' and more' if len(recorded) > 8 else ''}, "
        "allowed: ids with the token among them.",
        next_step="Drop the sample, or mask its token.",
    )


def _response_tokens(microbatch: PackedMicrobatch) -> npt.NDArray[np.int32]:
    """[R]"""
    ends = microbatch.cu_seqlens[1:].astype(np.int64)
    starts = ends - microbatch.response_lengths
    spans = [microbatch.tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    return np.concatenate([np.zeros(0, np.int32), *spans])


def _listed(microbatch: PackedMicrobatch) -> str:
    return ", ".join(str(int(index)) for index in microbatch.sample_indices)
