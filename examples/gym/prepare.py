"""Make the model and the tokenizer of the `gym` example from a seed, without a download; vime makes the tasks.

The model is that of the `reverse` example. It is shown words of three letters spelled backward, some of them wrongly,
until about one sampled answer in three is right.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.reverse.prepare import TOKEN_IDS, build_model, build_tokenizer
from vime.data.gym import GymTask, GymTasks
from vime.errors import ModelError, SettingsError, VimeError

TASKS = "spell_backward?seed={seed}&size=20000&max_word_len=3"
WARM_SEED = 1000
"""Far from the seed of the tasks that are trained on."""
ANSWER_TOKENS = 4
"""Three letters and the end of the turn."""
BATCH, LEARNING_RATE, MISTAKE_RATE, TARGET, MAX_STEPS = 64, 2e-3, 0.1, 0.32, 600


def gym_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, in lower case, since the model knows no capitals."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def answer_log_probs(model: Qwen3ForCausalLM, tasks: list[GymTask]) -> torch.Tensor:
    """Float32 [B, 4]: the log-probability of each token of the answers and of the end of the turn."""
    end = TOKEN_IDS["<eos>"]
    prompts = torch.tensor([[TOKEN_IDS[c] for c in task.question.lower()] for task in tasks])
    answers = torch.tensor([[*(TOKEN_IDS[c] for c in task.answer.lower()), end] for task in tasks])
    inputs = torch.cat([prompts, answers], dim=1)[:, :-1]
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=ANSWER_TOKENS).logits
    return torch.log_softmax(logits.float(), dim=-1).gather(2, answers[:, :, None])[:, :, 0]


def warm_start(model: Qwen3ForCausalLM, rng: random.Random, report: Callable[[str], None]) -> float:
    """Train `model` in place until a sampled answer is right with probability `TARGET`; that probability."""
    tasks = GymTasks(TASKS.format(seed=WARM_SEED))
    held_out = [tasks.task(row) for row in range(256)]
    shown = _demonstrations(tasks, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, MAX_STEPS + 1):
        loss = -answer_log_probs(model, [next(shown) for _ in range(BATCH)]).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10:
            continue
        with torch.no_grad():
            right = float(answer_log_probs(model, held_out).sum(dim=1).exp().mean())
        report(f"warm start: step {step}, loss {loss.item():.3f}, right {right:.3f}")
        if right >= TARGET:
            return right
    raise ModelError(f"The warm start didn't reach {TARGET} in {MAX_STEPS} steps.", next_step="Try another --seed.")


def prepare(directory: Path, seed: int, report: Callable[[str], None]) -> float:
    """Write model and tokenizer into `directory`, which must not exist; how often a sampled answer is right.

    Raises:
        SettingsError: the folder exists.
    """
    if directory.exists():
        raise SettingsError(f"--output {directory} exists.", next_step="Name a new folder.")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = build_model()
    right = warm_start(model, random.Random(seed), report)
    staging = directory.with_name(f".{directory.name}.partial")
    model.save_pretrained(staging)
    gym_tokenizer().save_pretrained(staging)
    staging.replace(directory)
    return right


def _demonstrations(tasks: GymTasks, rng: random.Random) -> Iterator[GymTask]:
    """Tasks with their answers, in which a letter is wrong at the rate `MISTAKE_RATE`."""
    while True:
        task = tasks.task(rng.randrange(len(tasks)))
        letters = [rng.choice(string.ascii_lowercase) if rng.random() < MISTAKE_RATE else c for c in task.answer]
        yield task._replace(answer="".join(letters))


def main() -> int:
    """Command line: `python examples/gym/prepare.py --output DIR --seed 0`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        right = prepare(args.output, args.seed, lambda line: print(line, flush=True))
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}; a sampled answer is right with probability {right:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
