"""Settings for tests of the preview: a Qwen3-4B on sixteen GPUs."""

import json
from pathlib import Path
from typing import Any

from vime.settings.groups import Settings
from vime.settings.parse import parse_settings

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip


def write_job(folder: Path, config: dict[str, Any] = QWEN3_4B) -> list[str]:
    """A model's config and three prompts in `folder`; the flags of a job on them, on one trainer and one engine."""
    (folder / "config.json").write_text(json.dumps(config))
    records = [{"input": f"question {number}", "label": f"answer {number}"} for number in range(3)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return [
        "--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl"), "--label-key", "label",
        "--num-rollout", "20", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rm-type", "f1",
        "--rollout-max-response-len", "1000", "--save", str(folder / "run"), "--save-interval", "5",
        "--rollout-data-transport", "straw", "--actor-num-gpus-per-node", "1",
    ]  # fmt: skip


def settings_of(folder: Path, *more: str) -> Settings:
    return parse_settings([*write_job(folder), *more])
