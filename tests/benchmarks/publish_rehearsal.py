"""A request answered by a transformers model whose weights change on the way, for the test of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.publish import PROMPT_TOKENS, Trainer, replay_all, transformers_model
from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling, VersionSpan
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names

NUM_TOKENS = 10


@dataclass
class Answered:
    """The answer, made with version 1 and then 2."""

    folder: Path
    trainer: Trainer
    request: GenerateRequest
    token_ids: list[int]
    log_probs: list[float]

    def errors(self, boundary: int) -> float:
        """Greatest difference when the answer says that version 2 begins at `boundary`."""
        spans = [VersionSpan(1, 0, boundary), VersionSpan(2, boundary, NUM_TOKENS)]
        result = GenerateResult("r", self.token_ids, self.log_probs, "length", spans, PROMPT_TOKENS, 0)
        (replay,) = replay_all(self.folder, self.trainer, [(self.request, result)])
        return max(replay.own_error, replay.kept_error)


@torch.no_grad()
def answer(folder: Path, boundary: int) -> Answered:
    """Greedy decoding with a cache that outlives the change of weights."""
    build_tiny_qwen3(folder / "model", init_std=0.08, tied=False, num_experts=4)
    folder = folder / "model"
    trainer = Trainer(list(read_weight_folder(folder, weight_names(folder))))
    models = {version: transformers_model(folder, trainer, version) for version in (1, 2)}
    prompt = list(range(3, 3 + PROMPT_TOKENS))
    inputs, cache = torch.tensor([prompt]), None
    token_ids: list[int] = []
    log_probs: list[float] = []
    for position in range(NUM_TOKENS):
        output = models[1 if position < boundary else 2](inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        scores = output.logits[0, -1].float().log_softmax(-1)
        token_ids.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
        inputs = torch.tensor([[token_ids[-1]]])
    return Answered(folder, trainer, GenerateRequest("r", prompt, Sampling(NUM_TOKENS)), token_ids, log_probs)
