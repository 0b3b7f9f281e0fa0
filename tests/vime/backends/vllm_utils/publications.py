"""A running engine and publications into it, for the contract tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.updates import FromGroup, LoadStaged
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names

Weights = list[tuple[str, torch.Tensor]]

MAX_MODEL_LEN = 2048


@dataclass
class EngineUnderTest:
    """A running engine and two sets of weights for it; it starts with `first`.

    `reference(weights, prompt, n)` tells, without the engine, which n tokens greedy decoding should give.
    """

    address: str
    vocab_size: int
    first: Weights
    second: Weights
    reference: Callable[[Weights, list[int], int], list[int]]
    log_path: Path | None = None
    """None of a stand-in."""


class Publisher:
    """Publishes weights into one engine as a trainer would."""

    def __init__(self, client: EngineClient, sender: WeightSender) -> None:
        self.client = client
        self.sender = sender

    async def join(self) -> None:
        """Connect sender and engine."""
        await self.client.init_weight_transfer(self.sender.init_info(1))
        await asyncio.to_thread(self.sender.connect)

    async def stage(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Send the weights to where they wait beside the model."""
        await self.client.stage_weights(FromGroup(version))
        await asyncio.to_thread(self.sender.send, weights)

    async def transfer(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send and load without raising the version."""
        version = await self.client.weight_version() + 1
        await self.stage(weights, version)
        await self.load(version)

    async def load(self, version: int) -> None:
        """Load what is staged."""
        await wait_until_staged(self.client, version)
        await self.client.start_weight_update()
        await self.client.update_weights(LoadStaged(version))

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Send, raise the version by one and return it."""
        version = await self.client.weight_version() + 1
        await self.transfer(weights)
        await self.client.finish_weight_update(version)
        return version


async def wait_until_staged(client: EngineClient, version: int) -> None:
    """Until the newest staging is done, however it ended; its version must be the given one."""
    while (status := (await client.staging())[0]).state == "running":
        await asyncio.sleep(0.01)
    assert status.version == version


def checkpoint(folder: Path, seed: int) -> Weights:
    """A new tiny checkpoint in `folder`, as named tensors."""
    build_tiny_qwen3(folder, seed=seed, init_std=0.08, max_position_embeddings=MAX_MODEL_LEN)
    return list(read_weight_folder(folder, weight_names(folder)))


def transformers_reference(folder: Path) -> Callable[[Weights, list[int], int], list[int]]:
    """Greedy decoding by the `transformers` model of a checkpoint folder, without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(weights: Weights, prompt: list[int], num_tokens: int) -> list[int]:
        state = model.state_dict()
        for name, tensor in weights:
            state[name].copy_(tensor)
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return greedy
