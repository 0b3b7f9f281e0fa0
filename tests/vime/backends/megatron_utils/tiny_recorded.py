"""Candidates and nuclei for the small batches: what a sampler would have recorded beside each response token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, pack
from vime.data.batch import NucleusRows, PackedMicrobatch, RouteRows, TopKRows, tokens_with_successor

K = 5


def pack_recorded(
    kind: str, sequences: Sequence[Sequence_], members: Sequence[int], vocab_size: int = 50
) -> PackedMicrobatch:
    """As `pack`, with candidates ("top_k") or nuclei ("nucleus"); some masked tokens have no nucleus.

    What a sequence has doesn't depend on the others in the microbatch.
    """
    packed = pack(sequences, members)
    ids: list[int] = []
    log_probs: list[float] = []
    lengths: list[int] = []
    for sequence in (sequences[member] for member in members):
        rng = np.random.default_rng(sequence.index)
        targets = sequence.tokens[-sequence.response_length :]
        for target, trained in zip(targets.tolist(), sequence.loss_mask.tolist(), strict=True):
            others = [token for token in rng.permutation(vocab_size).tolist() if token != target]
            length = K if kind == "top_k" else int(rng.integers(0 if not trained else 1, 7))
            ids += ([target, *others] if kind == "nucleus" or rng.random() < 0.7 else others)[:length]
            scores = rng.normal(0, 1.0, length)
            mass = 0.6 if kind == "top_k" else 1.0
            log_probs += (scores - np.log(np.exp(scores).sum() / mass)).tolist() if length else []
            lengths.append(length)
    flat_ids, flat_log_probs = np.array(ids, np.int32), np.array(log_probs, np.float32)
    if kind == "top_k":
        return replace(packed, top_k=TopKRows(flat_ids.reshape(-1, K), flat_log_probs.reshape(-1, K)))
    return replace(packed, nucleus=NucleusRows(flat_ids, np.cumsum([0, *lengths]), flat_log_probs))


def with_routes(
    packed: PackedMicrobatch, num_layers: int = 2, num_experts: int = 8, top_k: int = 2, absent: Sequence[int] = ()
) -> PackedMicrobatch:
    """Add random routes; the samples `absent` have none. What a sequence has doesn't depend on the others."""
    ids = [np.zeros((0, num_layers, top_k), np.uint8)]
    recorded = ~np.isin(packed.sample_indices, absent)
    lengths = np.diff(packed.cu_seqlens)
    for index, length in zip(packed.sample_indices[recorded].tolist(), lengths[recorded].tolist(), strict=True):
        scores = np.random.default_rng(index).random((length - 1, num_layers, num_experts))
        ids.append(scores.argsort(-1)[..., :top_k].astype(np.uint8))
    tokens = tokens_with_successor(packed.cu_seqlens)
    tokens = tokens[np.repeat(recorded, lengths)[tokens]]
    return replace(packed, routes=RouteRows(np.concatenate(ids), tokens, tuple(range(num_layers)), recorded))
