"""One wrong input: a command line, and what vime says about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODEL_CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
LATENT_CONFIG = {
    "model_type": "deepseek_v3",
    "intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Of a model with latent attention, on top of `MODEL_CONFIG`."""
BASE = (
    "--hf-checkpoint $DIR/model --prompt-data $DIR/prompts.jsonl --num-rollout 3 --rollout-batch-size 4 "
    "--n-samples-per-prompt 2 --rollout-max-response-len 8 --rm-type random --save $DIR/run "
    "--rollout-data-transport straw --actor-num-gpus-per-node 1"
)


@dataclass(frozen=True)
class Case:
    """`words` come after those of `BASE` ($DIR is the test's folder), less the flags in `leave_out`.

    `said` are the parts of the message: the flags with the value found, what is allowed, and the next step. `rule` is
    the function without which the command line would pass (None: it is refused before the rules). `files` are written
    into the folder first; `vllm` is the engine's version.
    """

    words: str
    found: str
    allowed: str
    next_step: str
    rule: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    leave_out: str = ""
    vllm: str = "0.32.0+cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.rule or 'input'}: {self.words or 'without ' + self.leave_out}"

    def command(self, folder: Path) -> list[str]:
        """Write the files, return the words for `vime train`."""
        (folder / "model").mkdir(exist_ok=True)
        config = {key: value for key, value in {**MODEL_CONFIG, **self.config}.items() if value is not None}
        (folder / "model" / "config.json").write_text(json.dumps(config))
        (folder / "prompts.jsonl").touch()
        for name, content in self.files.items():
            (folder / name).write_text(content)
        words = BASE.split()
        for flag in self.leave_out.split():
            place = words.index(flag)
            del words[place : place + 2]
        return [word.replace("$DIR", str(folder)) for word in [*words, *self.words.split()]]
