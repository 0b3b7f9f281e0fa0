"""A trainer whose model is spread over several ranks, in processes of their own, as the sender of weights."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.publish import Source
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, pack, totals
from vime.errors import RunFailedError, VimeError

END_S = 30.0
LEARNING_RATE = 1e-4


class _Rank:
    """One process, which answers one call after the other."""

    def __init__(self, process: Any, calls: Connection) -> None:
        self._process, self._calls, self._turn = process, calls, threading.Lock()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Raises what the call raises, and `RunFailedError` when the process has ended."""
        with self._turn:
            try:
                self._calls.send((name, *arguments))
                answer, error = self._calls.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError) as gone:
                raise RunFailedError(f"{self._process.name} has ended.", next_step="Look at its output.") from gone
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        self._calls.close()
        self._process.join(END_S)
        self._process.kill()


class ShardedTrainer(Source):
    """Tensor-parallel ranks, on the first GPUs or on the CPU. Use it with `with`."""

    def __init__(self, model: Path, num_ranks: int, gpus: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = folder / f"ranks_{time.monotonic_ns()}"
        self._ranks: list[_Rank] = []
        self._seed = 0
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, num_ranks, gpus, model, meeting, theirs), name=f"trainer rank {rank}"
            )
            process.daemon = True
            process.start()
            theirs.close()  # so that the end of the process is noticed
            self._ranks.append(_Rank(process, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.end()

    async def step(self) -> float:
        """Take an optimizer step on random tokens, so that the weights are others than before; its gradient norm."""
        self._seed += 1
        norms = await self._ask_all("step", self._seed)
        return float(norms[0])

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        joining: list[dict[str, object]] = await self._ask_first("open_sender", engine_names, timeout_s)
        return joining

    async def connect_sender(self) -> None:
        await self._ask_first("connect_sender")

    async def send_weights(self) -> int:
        sent = await self._ask_all("send_weights")
        return int(sent[0])

    async def _ask_first(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._ranks[0].ask, name, *arguments)

    async def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        calls = [asyncio.to_thread(rank.ask, name, *arguments) for rank in self._ranks]
        return list(await asyncio.gather(*calls))


def _serve(rank: int, num_ranks: int, gpus: int, model: Path, meeting: Path, calls: Connection) -> None:
    from vime.backends.megatron_utils.config import TrainerConfig
    from vime.backends.megatron_utils.trainer import MegatronTrainer

    sequences = len(make_sequences(0))
    config = TrainerConfig(
        hf_checkpoint=model,
        megatron_argv=("--tensor-model-parallel-size", str(num_ranks)),
        precision="bf16" if gpus else "fp32",
        global_batch_size=sequences,
        lr=LEARNING_RATE,
        num_threads=None if gpus else 1,
    )
    with MegatronTrainer(config, rank, num_ranks, f"file://{meeting}") as trainer:
        trainer.load_hf()
        weights = TrainerWeights(trainer, rank, PublishSettings(backend="nccl" if gpus else "gloo"))
        answers: dict[str, Callable[..., Any]] = {
            "open_sender": partial(weights.open_sender, "127.0.0.1"),
            "connect_sender": weights.connect_sender,
            "send_weights": weights.send,
            "step": partial(_step, trainer),
        }
        try:
            _answer_all(calls, answers)
        finally:
            weights.close()


def _step(trainer: Any, seed: int) -> float:
    batch = make_sequences(seed)
    metrics = trainer.train_step([pack(batch, range(len(batch)))], totals(batch))
    return float(metrics["grad_norm"])


def _answer_all(calls: Connection, answers: dict[str, Callable[..., Any]]) -> None:
    """Until the other side closes."""
    while True:
        try:
            name, *arguments = calls.recv()
        except EOFError:
            return
        try:
            calls.send((answers[name](*arguments), None))
        except VimeError as error:
            calls.send((None, error))
