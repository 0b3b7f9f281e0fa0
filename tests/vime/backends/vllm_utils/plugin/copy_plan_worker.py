"""Loads versions into real vLLM models in this process, as an engine's worker does, and writes down what came of it.

Linear and expert layers keep plain weights, as they do on GPUs; in the case "packed" they are packed for the CPU.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import get_model

from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.plugin.weight_engine import VimeInit, VimeWeightEngine
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names

CASES: dict[str, dict[str, Any]] = {
    "dense": {"tied": True},
    "untied": {"tied": False},
    "experts": {"num_experts": 4, "tied": True},
    "packed": {"tied": True},
}
Weights = list[tuple[str, torch.Tensor]]


class Rig:
    """One model, and a sender that stages versions for it."""

    def __init__(self, config: VllmConfig, model: torch.nn.Module) -> None:
        self.model = model
        self.engine = VimeWeightEngine(config.weight_transfer_config, config, torch.device("cpu"), model)
        self._sender = WeightSender("127.0.0.1", 0, 2)
        joining = self._sender.init_info(1)["group"]
        assert isinstance(joining, dict)
        self.engine.init_transfer_engine(VimeInit(joining))
        self._sender.connect()
        self.version = 0

    def load(self, weights: Weights) -> dict[str, torch.Tensor]:
        """What the model holds after a swap to these weights."""
        self.version += 1
        self.engine.stage({"type": "group", "version": self.version})
        self._sender.send(weights)
        while self.engine.inbox.status().state == "running":
            threading.Event().wait(0.001)
        self.engine.swap(self.version)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def close(self) -> None:
        self.engine.shutdown()
        self._sender.close()


def run(case: str, folder: Path) -> dict[str, Any]:
    versions = [weights(case, folder / f"{case}_{seed}", seed) for seed in range(3)]
    config = EngineArgs(
        model=str(folder / f"{case}_0"), dtype="float32", enforce_eager=True, max_model_len=64, load_format="auto"
    ).create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        rig = Rig(config, model)
        by_vllm = rig.load(versions[1])
        plan = rig.engine._plan
        rig.load(versions[2])
        by_plan = rig.load(versions[1])
        renamed = [("another.weight", versions[1][0][1]), *versions[1][1:]]
        falls_back = plan is not None and plan.arrange(renamed) is None
        differs = sorted(name for name in by_vllm if not torch.equal(by_vllm[name], by_plan[name]))
        rig.close()
    return {
        "planned": plan is not None,
        "num_copies": 0 if plan is None else plan.num_copies,
        "num_tensors": len(versions[1]),
        "num_compared": sum(tensor.numel() for tensor in by_vllm.values()),
        "differs": differs,
        "falls_back": falls_back,
    }


def weights(case: str, folder: Path, seed: int) -> Weights:
    build_tiny_qwen3(folder, seed=seed, init_std=0.08, **CASES[case])
    return list(read_weight_folder(folder, weight_names(folder)))


def main() -> None:
    folder = Path(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, init_method, 0, backend="gloo")
        initialize_model_parallel(1)
    torch.accelerator.empty_cache = lambda: None  # there is none
    pack, pack_experts = (
        layer_utils.dispatch_cpu_unquantized_gemm,
        UnquantizedFusedMoEMethod.process_weights_after_loading,
    )
    found = {}
    for case in CASES:
        is_packed = case == "packed"
        layer_utils.dispatch_cpu_unquantized_gemm = pack if is_packed else lambda *_, **__: None
        UnquantizedFusedMoEMethod.process_weights_after_loading = pack_experts if is_packed else lambda *_, **__: None
        found[case] = run(case, folder)
        print(case, found[case], flush=True)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
