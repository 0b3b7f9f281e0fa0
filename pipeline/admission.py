"""How many groups may be generated but not trained: enough for the trainer, not so many that they grow old. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdmissionRules:
    """What bounds the groups that are generated and not trained, those in flight included."""

    max_groups: int
    """The most of them."""
    batch: int
    """Groups that one rollout batch trains; each batch raises the policy version by one."""
    max_staleness: int | None
    """Most versions that a token may be older than the one under which its batch is planned; None: no bound."""
    newest_only: bool = False
    """Whether none is begun between a step and its publication, when its room is there and its version is not yet."""


def most_untrained(rules: AdmissionRules, *, oldest_version: int, begun_version: int, next_version: int) -> int:
    """Most groups that may be generated and not trained, counted with the one that would be begun now.

    `oldest_version` is that of the oldest group among them, `begun_version` that of one begun now, and `next_version`
    the newest under which the next batch can be planned. With U such groups the trainer gets at most floor(U / batch)
    batches further before it needs another, so the last of them is planned at most floor(U / batch) - 1 versions after
    `next_version`; that must not exceed `oldest_version` + max_staleness. Whoever is slow is waited for, since nothing
    is added meanwhile. One batch is allowed though groups of an earlier session are older than the bound already: else
    nothing would be trained again. None is begun that would be too old itself, as between a step and its publication.
    """
    if rules.newest_only and begun_version < next_version:
        return 0
    if rules.max_staleness is None:
        return rules.max_groups
    if begun_version + rules.max_staleness < next_version:
        return 0
    batches = min(oldest_version, begun_version) + rules.max_staleness - next_version + 1
    return min(rules.max_groups, max(1, batches) * rules.batch)
