"""Make the model, the tokenizer and the prompts of the `moe_r3` example from a seed, without a download.

The model is a Qwen3-MoE of 1.8 million parameters with random weights: 4 layers of 8 experts, two of which serve a
token. Tokenizer and prompts are those of the `reverse` example.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.reverse.prepare import NUM_QUESTIONS, TOKEN_IDS, build_tokenizer, question
from vime.errors import SettingsError, VimeError

NUM_PROMPTS = 4000


def build_model() -> Qwen3MoeForCausalLM:
    """A float32 Qwen3-MoE with random weights from torch's current random state."""
    config = Qwen3MoeConfig(
        vocab_size=len(TOKEN_IDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=TOKEN_IDS["<pad>"],
        bos_token_id=TOKEN_IDS["<bos>"],
        eos_token_id=TOKEN_IDS["<eos>"],
    )
    return Qwen3MoeForCausalLM(config)


def prepare(directory: Path, seed: int = 0) -> None:
    """Write `model` and `prompts.jsonl` into `directory`, which appears whole or not at all.

    Raises:
        SettingsError: the folder exists.
    """
    if directory.exists():
        raise SettingsError(f"--output {directory} exists.", next_step="Name a new folder.")
    staging = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build_model().save_pretrained(staging / "model")
    build_tokenizer().save_pretrained(staging / "model")
    numbers = random.Random(seed).sample(range(NUM_QUESTIONS), NUM_PROMPTS)
    lines = [json.dumps(question(number)) + "\n" for number in numbers]
    (staging / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    staging.replace(directory)


def main() -> int:
    """Command line: `python examples/moe_r3/prepare.py --output DIR --seed 0`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        prepare(args.output, args.seed)
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
