"""The durable queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, at_least, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class QueueSettings:
    """The durable queue between generation and training."""

    rollout_data_transport: str = flag(
        "object-store", "How samples travel to the trainer.", choices=("straw", "object-store", "nixl")
    )
    rollout_data_dir: str | None = flag(
        None, "Folder of the queue, on a file system that all nodes share; in --save when left out.", check=place
    )
    rollout_storage_profile: str = flag("local", "Kind of file system under the queue.", choices=("local", "juicefs"))
    rollout_storage_declaration: str | None = flag(
        None, "JSON file that declares the JuiceFS mount's options.", check=place
    )
    rollout_queue_run_id: str = flag("rollout", "Name of the run inside the pool.")
    rollout_queue_online_gc: bool = flag(False, "Reclaim the storage of trained samples while the run goes on.")
    rollout_queue_lease_seconds: float = flag(
        300.0, "Seconds without a heartbeat after which a group is handed out again.", check=above(0)
    )
    stall_timeout: float = flag(
        1800.0,
        "Seconds without progress (a new group, an optimizer step, another stage of the run) after which the run stops "
        "and says what it waits for.",
        check=above(0),
    )
    stall_after: float = flag(
        120.0, "Seconds without progress after which the run says what waits for what, again and again.", check=above(0)
    )
    max_process_restarts: int = flag(
        3,
        "Times in an hour that a producer, a router or the trainer's ranks are started again after a process died; the "
        "next death ends the run.",
        check=at_least(0),
    )
    rollout_queue_segment_mib: int | None = flag(
        None, "Size of one segment file in MiB; straw's own (1 GiB) when left out.", check=at_least(1)
    )
    rollout_queue_keep_commits: int = flag(
        2,
        "With --rollout-queue-online-gc: newest commits whose samples are kept, so that a resume from one trains all "
        "of them; groups that an older commit misses count as dropped.",
        check=at_least(1),
    )
    rollout_disk_reserve_gib: float = flag(
        1.0,
        "Free space under the queue, in GiB, below which production pauses until there is more. Versions of the "
        "weights on disk leave as much; 0 for none.",
        check=at_least(0),
    )
    rollout_queue_max_groups: int | None = flag(
        None,
        "Most groups generated but not trained, in-flight ones included; twice the rollout batch when left out.",
        check=at_least(1),
    )
    max_staleness: int | None = flag(
        None,
        "Most policy versions that a sample may be older than the weights it trains; production is paced, nothing is "
        "dropped. No bound when left out.",
        check=at_least(0),
    )
    rollout_queue_sc_dtype: str = flag(
        "float16",
        "Stored type of the log-probabilities of score centering's candidates.",
        choices=("float16", "float32"),
    )
    rollout_io_concurrency: int = flag(
        4, "Reads and writes of samples that a producer or trainer process has under way at once.", check=at_least(1)
    )
    rollout_num_producers: int = flag(
        1,
        "Processes that generate and reward groups, each with its part of the requests in flight; more where one has "
        "no processor time left. Another number may be given at each start.",
        check=at_least(1),
    )
    rollout_session_id: str | None = flag(
        None,
        "Identity under which engines outlive a job that dies or is stopped, for the same command started again; left "
        "out, engines end with their job.",
    )
    rollout_session_timeout: float = flag(
        600.0,
        "With --rollout-session-id: seconds that engines wait for a restarted job before they end by themselves.",
        check=above(0),
    )

    @property
    def is_in_memory(self) -> bool:
        """Whether groups and their payloads end with the processes of the run."""
        return self.rollout_data_transport != "straw"
