"""Whether Ray's NIXL transport can work on this machine, found out by starting an agent in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.versions import installed_version

PROBE_TIMEOUT_S = 60.0
_PROBE = (
    "from ray.experimental.rdt.util import get_tensor_transport_manager, get_transport_data_type\n"
    "get_transport_data_type('NIXL')\n"
    "backend = get_tensor_transport_manager('NIXL').select_backend()\n"
    "from nixl._api import nixl_agent, nixl_agent_config\n"
    "nixl_agent('probe', nixl_agent_config(backends=[backend]))\n"
)


def nixl_problems(settings: Settings) -> list[Problem]:
    """What stands against `--rollout-data-transport nixl`, when that is what the settings ask for."""
    if settings.queue.rollout_data_transport != "nixl":
        return []
    reason = why_no_nixl()
    if reason is None:
        return []
    return [
        problem(
            settings,
            "--rollout-data-transport",
            allowed="object-store or straw on this machine",
            reason=reason,
            next_step="Install what is missing on every node, or leave out the flag: object-store needs nothing.",
        )
    ]


def why_no_nixl() -> str | None:
    """Why the transport can't work here, a sentence; None when an agent starts."""
    ray = f"Ray {installed_version('ray')}"
    if importlib.util.find_spec("nixl") is None:
        return f"{ray}'s tensor transport needs the package nixl, which is not installed."
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"A NIXL agent did not start within {PROBE_TIMEOUT_S:.0f} s."
    if probe.returncode == 0:
        return None
    lines = probe.stderr.strip().splitlines()
    return f"A NIXL agent can't start under {ray}: {lines[-1] if lines else f'exit status {probe.returncode}'}."
