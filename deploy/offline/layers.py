"""What a packed vime consists of, and what of each wheel a machine with Hopper GPUs doesn't need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
PYTHON = (3, 12)
ARCHITECTURE = 90
"""sm_90, of H100 and H200."""

PRESENT = {
    "torch": "2.11.0",
    "transformers": "",
    "numpy": "",
    "pyarrow": "",
    "fsspec": "",
    "aiohttp": "",
    "psutil": "",
    "pillow": "",
    "pyyaml": "",
    "rich": "",
    "msgpack": "",
    "typing-extensions": "",
}
"""What the machine must have of its own, and where only one version will do, which."""


@dataclass(frozen=True)
class Layer:
    """A part that is packed, carried and installed by itself."""

    name: str
    leave_out: tuple[str, ...] = ()
    """Globs of files and folders, from the root of the installed packages."""
    gpu_code: tuple[tuple[str, bool], ...] = ()
    """Libraries of which only the architecture's code is kept, and whether PTX stands in where there is none."""
    compiles: bool = False
    """Whether packages without a wheel are compiled here, which needs that Python; else the layer is left out."""

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"


LAYERS = (
    Layer(
        "engine",
        leave_out=(
            "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # Hopper has its own, fa3
            "vllm/vllm-rs",
            "vllm/third_party/deep_gemm/_C.cpython-31[0134]*",
            "vllm/third_party/deep_gemm/include",
            "vllm/third_party/fmha_sm100",
            "pycountry/locales",
            "tvm_ffi/include",
            "mistral_common/data/*",
        ),
        gpu_code=(
            ("vllm/_C_stable_libtorch.abi3.so", True),
            ("vllm/_moe_C_stable_libtorch.abi3.so", False),
            ("vllm/_qutlass_C.abi3.so", False),
            ("vllm/_flashmla_C.abi3.so", False),
        ),
    ),
    Layer("stream", leave_out=("ray/jars", "ray/dashboard/client/build", "ray/rllib", "ray/include")),
    Layer("juicefs"),
    Layer("tasks", compiles=True),
    Layer("tests"),
)
PROJECT = "project"
"""The layer of vime itself: all that git tracks, with its metadata."""
