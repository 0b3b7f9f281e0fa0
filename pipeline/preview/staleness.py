"""How old a trained sample may be, in policy versions, under given queue settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.groups import Settings


@dataclass(frozen=True)
class Staleness:
    """Ages in policy versions, from the first sampled token of a group to the batch that trains it."""

    max_groups: int
    """Most groups generated but not trained, those in flight included."""
    groups_in_flight: int
    """Most groups that are generated at once."""
    waiting: int
    """Most versions between a group's acceptance and its training."""
    in_flight_mean: float
    """Versions that pass on average while a group is generated, when all requests are in use."""
    most: int | None
    """Largest age; None: nothing bounds it, because running requests outlive every publication."""


def staleness_bound(
    *, batch: int, max_groups: int, groups_in_flight: int, flush_interval: int, publish_every: int = 1
) -> Staleness:
    """The ages that follow from the queue's limit and the flush rule.

    At most `max_groups` groups are untrained, and each batch takes the `batch` oldest, so an accepted group is trained
    in one of the next ceil(max_groups / batch) batches; the first of them may come after a publication. A group
    whose generation began after a flush ends before the next one or is aborted and generated anew, so a flush every N
    versions adds at most N - 1.
    """
    waiting = -(-max_groups // batch)
    in_use = min(groups_in_flight, max_groups)
    waiting = -(-waiting // publish_every)
    return Staleness(
        max_groups=max_groups,
        groups_in_flight=in_use,
        waiting=waiting,
        in_flight_mean=in_use / batch / publish_every,
        most=waiting + flush_interval - 1 if flush_interval > 0 else None,
    )


def staleness_of(settings: Settings, num_engines: int) -> Staleness:
    """The bound for a run's settings."""
    batch = settings.data.rollout_batch_size or 1
    requests = settings.rollout.vllm_server_concurrency * max(num_engines, 1)
    return staleness_bound(
        batch=batch,
        max_groups=settings.queue.rollout_queue_max_groups or 2 * batch,
        groups_in_flight=max(1, requests // settings.data.n_samples_per_prompt),
        flush_interval=settings.weights.flush_cache_interval,
        publish_every=settings.weights.update_weights_interval,
    )
