"""What a transport promises, in the words that a run says at its start."""

from __future__ import annotations

from storage.queue_types import MemorySnapshot
from vime.counted import agreeing, counted
from vime.settings.groups import Settings

_MEDIUM = {"object-store": "Ray's object store", "nixl": "NIXL, out of the producers' memory"}


def transport_words(settings: Settings, resumed_from: MemorySnapshot | None) -> list[str]:
    """Sentences for the user; none for a queue on disk, which keeps what it accepted.

    `resumed_from` is what the commit that the session goes on from kept of its queue.
    """
    if not settings.queue.is_in_memory:
        return []
    words = [
        f"Samples travel through {_MEDIUM[settings.queue.rollout_data_transport]} and their queue is in memory: what "
        "the newest commit doesn't call trained when a session ends, the next one generates again. "
        "--rollout-data-transport straw keeps it."
    ]
    if resumed_from is not None and (left := resumed_from.num_unfinished):
        words.append(
            f"{counted(left, 'group')} {agreeing(left, 'was')} not trained at that commit and ended with the memory of "
            "their session: generated again, as are those that came after."
        )
    return words
