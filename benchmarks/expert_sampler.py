"""A tiny mixture of experts in the middle of its training, and a bf16 sampler of it that records its routes.

Plain transformers: what a trainer is compared with must not share its code.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from vime.utils.types import Sample

EOS, REVERSE, EQUALS, FIRST_DIGIT = 2, 3, 4, 5
VOCAB_SIZE = FIRST_DIGIT + 10
DIGITS = 5
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 8, 2
SFT_BATCH, SFT_LR = 64, 1e-3


@dataclass(frozen=True)
class Task:
    """Write five digits backwards."""

    prompt: list[int]
    answer: list[int]


def tasks(count: int, seed: int) -> list[Task]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        digits = [FIRST_DIGIT + chance.randrange(10) for _ in range(DIGITS)]
        found.append(Task([REVERSE, *digits, EQUALS], [*reversed(digits), EOS]))
    return found


def half_trained_model(num_steps: int, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A float32 Qwen3-MoE (4 layers, 8 experts, 2 of which serve a token) after `num_steps` of supervised training."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_intermediate_size=128,
            intermediate_size=256,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            router_aux_loss_coef=0.0,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS,
            attention_dropout=0.0,
            dtype="float32",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(num_steps):
        batch = tasks(SFT_BATCH, seed=1000 * (seed + 1) + step)
        tokens = torch.tensor([task.prompt + task.answer for task in batch])
        logits = model(tokens[:, :-1]).logits[:, -len(batch[0].answer) :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -logits.shape[1] :].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def save(model: Qwen3MoeForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


class Bf16Sampler:
    """Samples with cached keys and values, one token after the other, as an engine does.

    Weights, activations and routers are bf16; the output head is multiplied in float32, as vime's engines do it.
    """

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self._model = copy.deepcopy(model).to(torch.bfloat16)
        self._head = self._model.lm_head.weight.float()

    @torch.no_grad()
    def sample(self, num_groups: int, group_size: int, seed: int) -> list[list[Sample]]:
        """`num_groups` of samples with log-probabilities and routes of all their tokens but the last."""
        torch.manual_seed(seed)
        prompts = [task for task in tasks(num_groups, seed) for _ in range(group_size)]
        given = torch.tensor([task.prompt for task in prompts])
        cache, tokens = DynamicCache(), given
        chosen: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        routes: list[np.ndarray[Any, Any]] = []
        for _ in range(len(prompts[0].answer)):
            with self._recorded_routes(len(prompts)) as layers:
                hidden = self._model.model(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state
            routes.append(np.stack(layers, axis=2))
            scores = torch.log_softmax(hidden[:, -1].float() @ self._head.T, -1)
            tokens = torch.multinomial(scores.exp(), 1)
            chosen.append(tokens)
            log_probs.append(scores.gather(1, tokens))
        responses, values = torch.cat(chosen, 1).tolist(), torch.cat(log_probs, 1).tolist()
        every = np.concatenate(routes, axis=1)
        samples = [
            _sample(number // group_size, number, task, response, scored, experts)
            for number, (task, response, scored, experts) in enumerate(
                zip(prompts, responses, values, every, strict=True)
            )
        ]
        return [samples[first : first + group_size] for first in range(0, len(samples), group_size)]

    @contextmanager
    def _recorded_routes(self, num_sequences: int) -> Iterator[list[np.ndarray[Any, Any]]]:
        """The experts of the tokens of one forward pass: [sequences, tokens, K] of each layer."""
        layers: list[np.ndarray[Any, Any]] = []

        def record(_module: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            layers.append(output[2].numpy().reshape(num_sequences, -1, TOP_K))

        hooks = [layer.mlp.gate.register_forward_hook(record) for layer in self._model.model.layers]
        try:
            yield layers
        finally:
            for hook in hooks:
                hook.remove()


def _sample(
    group: int, index: int, task: Task, response: Sequence[int], log_probs: Sequence[float], experts: Any
) -> Sample:
    """One sample, cut after the end of its answer."""
    length = response.index(EOS) + 1 if EOS in response else len(response)
    tokens = task.prompt + list(response[:length])
    return Sample(
        group_index=group,
        index=index,
        tokens=tokens,
        response_length=length,
        rollout_log_probs=list(log_probs[:length]),
        rollout_routed_experts=experts[: len(tokens) - 1],
        version_spans=[(0, 0, length)],
        reward=float(list(response[:length]) == task.answer),
        status=Sample.Status.COMPLETED,
    )
