"""The same tokens scored as in training, and as a sampler with one of the known faults would report them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.backends.megatron_utils.schedule import ForwardPass
from vime.data.batch import PackedMicrobatch


def probe_scores(forward: ForwardPass, microbatches: Sequence[PackedMicrobatch]) -> dict[str, npt.NDArray[np.float32]]:
    """Log-probabilities [R] by field of `vime.algorithms.parity.Readings`: trainer, raw, unscaled, other_head.

    Collective. Microbatches that come with routes or nuclei keep to them, but for `raw`, which is over the whole
    vocabulary.
    """
    head = forward.head
    unscaled = dataclasses.replace(head, temperature=1.0)
    other = dataclasses.replace(head, fp32=not head.fp32, bf16=head.fp32)
    ways = {
        "trainer": (head, True),
        "raw": (unscaled, False),
        "unscaled": (unscaled, True),
        "other_head": (other, True),
    }
    return {
        name: np.concatenate(
            [log_probs for (log_probs,) in forward.scores(microbatches, head=head, replay_nucleus=replay_nucleus)]
        )
        for name, (head, replay_nucleus) in ways.items()
    }
