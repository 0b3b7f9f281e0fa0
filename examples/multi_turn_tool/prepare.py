"""Make the model, the tokenizer and the prompts of the `multi_turn_tool` example from a seed, without a download.

The model is that of the `reverse` example. It is shown conversations with the calculator, with mistakes in them, until
about one sampled conversation in three ends with the right product.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from examples.multi_turn_tool.calculator import NUM_DIGITS, answer
from examples.reverse.prepare import TOKEN_IDS, build_model, build_tokenizer
from vime.errors import ModelError, SettingsError, VimeError

BATCH, LEARNING_RATE, MISTAKE_RATE, TARGET, MAX_STEPS = 64, 1e-3, 0.06, 0.3, 800
OPERANDS = range(10, 100)


@dataclass(frozen=True)
class Problem:
    """A product of two numbers of two digits."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}*{self.right}"

    @property
    def label(self) -> str:
        return f"{self.left * self.right:0{NUM_DIGITS}d}"

    def parts(self) -> list[tuple[str, bool]]:
        """The conversation as it should go: (text, whether the model says it)."""
        call = f"({self.prompt})"
        return [(f"{self.prompt}=", False), (call, True), (f"{answer(call)}=", False), (self.label, True)]


def encode(parts: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Token ids, one a character, with the end of the last turn; and which of them the model says."""
    ids = [TOKEN_IDS[character] for text, _ in parts for character in text]
    said = [is_said for text, is_said in parts for _ in text]
    return [*ids, TOKEN_IDS["<eos>"]], [*said, True]


def with_mistakes(parts: list[tuple[str, bool]], rng: random.Random) -> list[tuple[str, bool]]:
    """The conversation with digits of the model's replaced at the rate `MISTAKE_RATE`."""

    def mistaken(text: str) -> str:
        return "".join(rng.choice("0123456789") if c.isdigit() and rng.random() < MISTAKE_RATE else c for c in text)

    return [(mistaken(text) if is_said else text, is_said) for text, is_said in parts]


def log_probs_of(model: Qwen3ForCausalLM, conversations: list[list[tuple[str, bool]]]) -> torch.Tensor:
    """Float32 [B, T - 1]: the log-probability of each token that the model says, 0 for the others."""
    encoded = [encode(parts) for parts in conversations]
    tokens = torch.tensor([ids for ids, _ in encoded])
    said = torch.tensor([said for _, said in encoded])[:, 1:]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    log_probs = torch.log_softmax(logits.float(), dim=-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    return log_probs * said


def warm_start(
    model: Qwen3ForCausalLM, problems: list[Problem], rng: random.Random, report: Callable[[str], None]
) -> float:
    """Train `model` in place until a sampled conversation is right with probability `TARGET`; that probability."""
    held_out = [problem.parts() for problem in problems[:256]]
    shown = problems[256:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, MAX_STEPS + 1):
        log_probs = log_probs_of(model, [with_mistakes(rng.choice(shown).parts(), rng) for _ in range(BATCH)])
        loss = -log_probs.sum() / (log_probs != 0).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2:
            continue
        with torch.no_grad():
            right = float(log_probs_of(model, held_out).sum(dim=1).exp().mean())
        report(f"warm start: step {step}, loss {loss.item():.3f}, right {right:.3f}")
        if right >= TARGET:
            return right
    raise ModelError(f"The warm start didn't reach {TARGET} in {MAX_STEPS} steps.", next_step="Try another --seed.")


def prepare(directory: Path, seed: int, report: Callable[[str], None]) -> float:
    """Write `model` and `prompts.jsonl` into `directory`, which must not exist; how often a conversation is right.

    Half of all problems are prompts; the model saw only the others.

    Raises:
        SettingsError: the folder exists.
    """
    if directory.exists():
        raise SettingsError(f"--output {directory} exists.", next_step="Name a new folder.")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng, model = random.Random(seed), build_model()
    problems = [Problem(left, right) for left in OPERANDS for right in OPERANDS]
    rng.shuffle(problems)
    half = len(problems) // 2
    right = warm_start(model, problems[half:], rng, report)
    staging = directory.with_name(f".{directory.name}.partial")
    model.save_pretrained(staging / "model")
    build_tokenizer().save_pretrained(staging / "model")
    lines = [json.dumps({"prompt": problem.prompt, "label": problem.label}) + "\n" for problem in problems[:half]]
    (staging / "prompts.jsonl").write_text("".join(lines))
    staging.replace(directory)
    return right


def main() -> int:
    """Command line: `python examples/multi_turn_tool/prepare.py --output DIR --seed 0`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        right = prepare(args.output, args.seed, lambda line: print(line, flush=True))
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}; a sampled conversation is right with probability {right:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
