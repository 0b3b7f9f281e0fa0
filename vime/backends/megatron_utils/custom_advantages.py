"""Advantages by a function of the user's own (--custom-advantage-function-path)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vime.algorithms.advantages import Advantages
from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.ragged import pieces
from vime.backends.megatron_utils.sequences import kl_of, lengths_of, mask_of, rewards_of
from vime.data.batch import PackedMicrobatch
from vime.errors import TrainerError


def custom_advantages(
    batches: Iterable[PackedMicrobatch], config: ObjectiveConfig, function: Callable[[Any, dict[str, Any]], None]
) -> list[Advantages]:
    """Advantages of each microbatch from the user's function, which is called once for the rank's sequences."""
    data, sizes = rollout_data(batches, config)
    function(config.hook_args, data)
    return taken_advantages(data, sizes, "--custom-advantage-function-path")


def taken_advantages(data: Mapping[str, Any], sizes: Sequence[int], flag: str) -> list[Advantages]:
    """Advantages and returns of each microbatch, which has `sizes` response tokens, as a function left them.

    Raises `TrainerError`, naming the function's `flag`, for other lengths.
    """
    expected = data["response_lengths"]
    for name in ("advantages", "returns"):
        found = [len(values) for values in data.get(name, ())]
        if found != expected:
            raise TrainerError(
                f"{flag} left rollout_data[{name!r}] with lengths {found}, "
                f"allowed: {expected}, one tensor for each sequence with one value for each response token.",
                next_step="Correct the function.",
            )
    advantages, returns = (
        pieces(torch.cat([torch.as_tensor(item, dtype=torch.float32) for item in data[name]]), list(sizes))
        for name in ("advantages", "returns")
    )
    return [Advantages(*pair) for pair in zip(advantages, returns, strict=True)]


def rollout_data(batches: Iterable[PackedMicrobatch], config: ObjectiveConfig) -> tuple[dict[str, Any], list[int]]:
    """What functions on a rollout read, lists with one entry per sequence; and response tokens per microbatch."""
    sizes = []
    per_token: dict[str, list[torch.Tensor]] = {"loss_masks": [], "rollout_log_probs": [], "kl": []}
    data: dict[str, Any] = {"tokens": [], "response_lengths": [], "total_lengths": [], "rewards": []}
    data["sample_indices"] = []
    for batch in batches:
        sizes.append(len(batch.loss_mask))
        lengths = lengths_of(batch).tolist()
        totals = torch.tensor(batch.cu_seqlens, dtype=torch.int64).diff().tolist()
        data["response_lengths"] += lengths
        data["total_lengths"] += totals
        data["tokens"] += pieces(torch.tensor(batch.tokens, dtype=torch.int64), totals)
        data["rewards"] += rewards_of(batch).tolist()
        data["sample_indices"] += batch.sample_indices.tolist()
        per_token["loss_masks"] += pieces(mask_of(batch).int(), lengths)
        per_token["rollout_log_probs"] += pieces(torch.tensor(batch.sampler_log_probs), lengths)
        per_token["kl"] += pieces(kl_of(batch, config), lengths)
        optional = {
            "log_probs": batch.old_log_probs,
            "entropy": batch.old_entropies,
            "ref_log_probs": batch.reference_log_probs,
            "teacher_log_probs": batch.teacher_log_probs,
            "values": batch.values,
        }
        for name, values in optional.items():
            if values is not None:
                per_token.setdefault(name, []).extend(pieces(torch.tensor(values), lengths))
    return {**data, **per_token}, sizes
