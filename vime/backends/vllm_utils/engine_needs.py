"""Whether an engine that has started can do what the run needs of it."""

from __future__ import annotations

from vime.backends.vllm_utils.protocol import EngineCapabilities, SampleColumns
from vime.errors import EngineStartError


def check_engine(address: str, capabilities: EngineCapabilities, needs: SampleColumns, *, sleeps: bool = False) -> None:
    """Raise `EngineStartError` naming the engine, its version, what it lacks, and what to do instead."""
    lacks = {
        f"{needs.num_candidates} candidates of each token, for --score-centering-top-k (it returns "
        f"{capabilities.max_candidates})": capabilities.max_candidates < needs.num_candidates,
        "routed experts, for --use-rollout-routing-replay": needs.routes and not capabilities.routed_experts,
        "the tokens that top-p left, for --rollout-top-p": needs.nucleus and not capabilities.nucleus,
    }
    if sleeps and not capabilities.sleep:
        raise EngineStartError(
            f"Engine {address} (vLLM {capabilities.engine_version}) can't leave its device's memory: it has no route "
            "/sleep.",
            next_step="Give --no-offload-rollout and a --vllm-gpu-memory-utilization that leaves the trainer room.",
        )
    missing = [what for what, is_lacking in lacks.items() if is_lacking]
    if missing:
        without = "" if capabilities.columns else " It runs without vime's sample route."
        raise EngineStartError(
            f"Engine {address} (vLLM {capabilities.engine_version}) can't return {' and '.join(missing)}.{without}",
            next_step="Leave out the flag, or "
            + ("use another vLLM." if capabilities.columns else "install vime again, so that vLLM finds its plug-in."),
        )
