"""A Ray cluster that outlives the sessions which join it: python -m benchmarks.chaos.standing_cluster FOLDER SLOTS

Its workers come from a fork server. It prints its address, and ends with its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams

from benchmarks.chaos import fork_client
from pipeline.cluster import OBJECT_STORE_BYTES
from pipeline.node_devices import CPU_SLOT


def main(folder: str, num_slots: int) -> None:
    parameters = RayParams(
        num_cpus=8,
        resources={CPU_SLOT: num_slots},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=folder,
        setup_worker_path=str(Path(fork_client.__file__).resolve()),
        _system_config={"prestart_worker_first_driver": False},
    )
    node = Node(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)
    print(node.gcs_address, flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
