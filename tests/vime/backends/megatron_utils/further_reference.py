"""The prediction of further tokens written from its formulas: dense, float64, one sequence at a time.

Equations 21 to 24 of arXiv:2412.19437, for one depth; layers are those of transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_families import FURTHER_BESIDE, FURTHER_COPIES
from tests.vime.backends.megatron_utils.dense_reference import load_double
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_


class FurtherReference:
    """The model of `tiny_families.build_further_model` in float64.

    transformers reads its last layer as one more usual layer, and the rest is computed here.
    """

    def __init__(self, folder: Path) -> None:
        deeper = folder.with_name(f"{folder.name}_deeper")
        shutil.copytree(folder, deeper)
        config = json.loads((folder / "config.json").read_text())
        self.num_layers = int(config["num_hidden_layers"])
        self.layer = f"model.layers.{self.num_layers}."
        (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": self.num_layers + 1}))
        tensors = load_file(folder / "model.safetensors")
        beside = {name: tensors.pop(self.layer + name) for name in (*FURTHER_BESIDE, *FURTHER_COPIES)}
        save_file(tensors, deeper / "model.safetensors", {"format": "pt"})
        self.model = load_double(deeper)
        self.beside = {name: beside[name].double().requires_grad_() for name in FURTHER_BESIDE}
        self._eps = float(config["rms_norm_eps"])

    def __call__(self, tokens: torch.Tensor) -> SimpleNamespace:
        """Logits of [1, T] as a model of transformers gives them."""
        return SimpleNamespace(logits=self.model.lm_head(self._states(tokens)))

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def loss(self, sequences: Sequence[Sequence_]) -> torch.Tensor:
        """Cross-entropy of the token behind the next one, each rollout weighing alike."""
        rollouts: dict[int, int] = {}
        for item in sequences:
            rollouts[item.rollout] = rollouts.get(item.rollout, 0) + int(item.loss_mask.sum())
        total = torch.zeros((), dtype=torch.float64)
        for item in sequences:
            if len(item.tokens) < 3:
                continue
            tokens = torch.as_tensor(item.tokens.astype("int64"))[None]
            log_probs = self._further_logits(tokens)[0].log_softmax(-1)
            prompt = len(item.tokens) - item.response_length
            for position in range(max(prompt, 2), len(item.tokens)):
                if item.loss_mask[position - prompt]:
                    weight = 1 / (len(rollouts) * max(rollouts[item.rollout], 1))
                    total = total - weight * log_probs[position - 2, int(item.tokens[position])]
        return total

    def gradients(self) -> dict[str, torch.Tensor]:
        """By the names of the files."""
        found = {self.layer + name: tensor.grad for name, tensor in self.beside.items() if tensor.grad is not None}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            prefix, _, part = name.rpartition(".experts.")
            if not prefix:
                found[name] = parameter.grad
                continue
            for expert, gradient in enumerate(parameter.grad):
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                for each, value in zip(names, gradient.chunk(len(names)), strict=True):
                    found[f"{prefix}.experts.{expert}.{each}.weight"] = value
        return found

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.model.model.embed_tokens(tokens)
        for layer in self.model.model.layers[: self.num_layers]:
            states = self._through(layer, states)
        return self.model.model.norm(states)

    def _further_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, T - 2, V], of the tokens from the third on."""
        known, following = self._states(tokens)[:, :-2], self.model.model.embed_tokens(tokens)[:, 1:-1]
        joined = torch.cat([self._norm(following, "enorm.weight"), self._norm(known, "hnorm.weight")], dim=-1)
        states = self._through(self.model.model.layers[self.num_layers], joined @ self.beside["eh_proj.weight"].T)
        return self.model.lm_head(self._norm(states, "shared_head.norm.weight"))

    def _through(self, layer: Any, states: torch.Tensor) -> torch.Tensor:
        length = states.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        angles = self.model.model.rotary_emb(states, positions)
        found = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self._eps) * self.beside[name]
