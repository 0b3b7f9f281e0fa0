"""Engines that a part of the suite starts itself, on whatever devices there are, and the larger of its models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import HEAD, one_at_a_time
from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.server import EngineServer

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
"""Two layers of the shape of Qwen3-30B-A3B: 1.6 billion parameters, embeddings included."""
SMALL_DENSE: dict[str, Any] = {"vocab_size": 1024, "max_position_embeddings": 4096}
SMALL_MOE: dict[str, Any] = SMALL_DENSE | {"num_experts": 8, "norm_topk_prob": True}
GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
"""`--compilation-config` of the engine on a GPU: nothing is compiled, so that it is ready in half the time."""


def model_in(folder: Path, *, small: bool, experts: bool = False, init_std: float = 0.02) -> Path:
    """A checkpoint with random weights of that spread; one that is there stays."""
    shape = (SMALL_MOE if experts else SMALL_DENSE) if small else (QWEN3_MOE if experts else QWEN3_06B)
    with one_at_a_time(folder.parent):
        if not (folder / "tokenizer_config.json").exists():  # written last
            build_tiny_qwen3(folder, init_std=init_std, **shape)
    return folder


def engine_launch(
    model: Path,
    gpus: int,
    *,
    max_model_len: int,
    name: str = "engine",
    gpu_share: float | None = None,
    columns: SampleColumns = NO_COLUMNS,
    extra: tuple[str, ...] = (),
) -> EngineLaunch:
    """As a job starts its own: float32 on a CPU, bf16 with a float32 head and graphs on a GPU.

    `gpu_share` is the part of a GPU's memory that it takes; None leaves it to vLLM.
    """
    if gpus:
        share = () if gpu_share is None else ("--gpu-memory-utilization", str(gpu_share))
        extra = (*extra, *share, "--hf-overrides", HEAD, "--compilation-config", GRAPHS)
    return EngineLaunch(
        model,
        "127.0.0.1",
        0,
        model.parent / f"{name}.log",
        "benchmark",
        max_model_len=max_model_len,
        device="gpu" if gpus else "cpu",
        dtype="bfloat16" if gpus else None,
        columns=columns,
        extra_args=extra,
    )


@contextmanager
def ready_engine(launch: EngineLaunch, gpus: int) -> Iterator[EngineServer]:
    """A running engine, on the second GPU where there are two."""
    with started_on(launch, gpus, [1] if gpus > 1 else []) as server:
        server.wait_ready()
        yield server


@contextmanager
def started_on(launch: EngineLaunch, gpus: int, numbers: Sequence[int]) -> Iterator[EngineServer]:
    """An engine that has begun to start, on these of the visible GPUs; on all of them for none."""
    server = EngineServer(launch)
    with only_visible(gpus, numbers):
        server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def only_visible(gpus: int, numbers: Sequence[int]) -> Iterator[None]:
    """Let processes that are started meanwhile see these of `gpus` GPUs alone; all of them for none."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if numbers:
            visible = (before or ",".join(map(str, range(gpus)))).split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[number] for number in numbers)
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif numbers:
            del os.environ["CUDA_VISIBLE_DEVICES"]
