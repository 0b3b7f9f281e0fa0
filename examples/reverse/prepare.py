"""Make the model, the tokenizer and the prompts of the `reverse` example from a seed, without a download.

The model is a Qwen3 of 0.3 million parameters that was shown the task in about a hundred steps of supervised training
on demonstrations with mistakes in them, until about one sampled answer in three is right: enough for reinforcement
learning to find a reward, and far enough from the end for it to have something to learn.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from vime.errors import ModelError, SettingsError, VimeError

NUM_DIGITS = 5
NUM_QUESTIONS = 10**NUM_DIGITS
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
TOKENS = (*SPECIAL_TOKENS, *"0123456789abcdefghijklmnopqrstuvwxyz+-*=>:,. ()")
TOKEN_IDS = {token: i for i, token in enumerate(TOKENS)}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt and not messages[-1]['content'].endswith('=') %}={% endif %}"
)
WARM_BATCH = 64
WARM_LEARNING_RATE = 1e-3
WARM_TARGET = 0.32
MISTAKE_RATE = 0.08
MAX_WARM_STEPS = 400
NUM_HELD_OUT = 256


@dataclass(frozen=True)
class PreparedExample:
    """What `prepare` wrote: a Hugging Face checkpoint with its tokenizer, and a prompt file of JSON lines."""

    hf_checkpoint: Path
    prompt_data: Path
    exact_match: float
    """Probability that an answer sampled at temperature 1 is right, averaged over held-out questions."""
    warm_steps: int


def question(number: int) -> dict[str, str]:
    """Return the prompt record of `number`: `{"prompt": "r01234=", "label": "43210"}`."""
    digits = f"{number:0{NUM_DIGITS}d}"
    return {"prompt": f"r{digits}=", "label": digits[::-1]}


def demonstration(number: int, rng: random.Random, mistake_rate: float) -> dict[str, str]:
    """Return `question(number)` with each digit of its label replaced at a rate by a random one."""
    record = question(number)
    digits = [rng.choice("0123456789") if rng.random() < mistake_rate else digit for digit in record["label"]]
    return {**record, "label": "".join(digits)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character, with a chat template that ends a turn with `=`."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model() -> Qwen3ForCausalLM:
    """Return a float32 Qwen3 with random weights from torch's current random state."""
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=TOKEN_IDS["<pad>"],
        bos_token_id=TOKEN_IDS["<bos>"],
        eos_token_id=TOKEN_IDS["<eos>"],
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def answer_log_probs(model: Qwen3ForCausalLM, records: list[dict[str, str]]) -> torch.Tensor:
    """Return float32 [B, T]: the log-probability of each token of the records' labels and of `<eos>` (T = 6)."""
    prompts = torch.tensor([[TOKEN_IDS[c] for c in record["prompt"]] for record in records])
    answers = torch.tensor([[*(TOKEN_IDS[c] for c in record["label"]), TOKEN_IDS["<eos>"]] for record in records])
    inputs = torch.cat([prompts, answers], dim=1)[:, :-1]
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=answers.shape[1]).logits
    return torch.log_softmax(logits.float(), dim=-1).gather(2, answers[:, :, None])[:, :, 0]


def _mean_probability(log_probs: torch.Tensor) -> float:
    """Return the mean probability of the answers whose token log-probabilities are float32 [B, T]."""
    return float(log_probs.detach().sum(dim=1).exp().mean())


def warm_start(
    model: Qwen3ForCausalLM,
    numbers: Iterator[int],
    rng: random.Random,
    mistake_rate: float,
    report: Callable[[str], None],
) -> tuple[float, int]:
    """Train `model` in place on demonstrations until a sampled answer is right with probability `WARM_TARGET`.

    The probability is computed, not sampled, so the stopping point has no noise. Returns it with the number of steps.
    """
    held_out = [question(next(numbers)) for _ in range(NUM_HELD_OUT)]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=WARM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    exact_match = 0.0
    for step in range(1, MAX_WARM_STEPS + 1):
        log_probs = answer_log_probs(
            model, [demonstration(next(numbers), rng, mistake_rate) for _ in range(WARM_BATCH)]
        )
        loss = -log_probs.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exact_match = _mean_probability(log_probs)
        if exact_match >= WARM_TARGET / 3:  # the batch is a rough estimate that costs nothing
            with torch.no_grad():
                exact_match = _mean_probability(answer_log_probs(model, held_out))
        if step % 20 == 0 or exact_match >= WARM_TARGET:
            report(f"warm start: step {step}, loss {loss.item():.3f}, exact match {exact_match:.3f}")
        if exact_match >= WARM_TARGET:
            return exact_match, step
    raise ModelError(
        f"The warm start reached an exact match of {exact_match:.3f} in {MAX_WARM_STEPS} steps, "
        f"wanted: {WARM_TARGET} or more.",
        next_step="Try another --seed.",
    )


@contextmanager
def _own_state(seed: int) -> Iterator[None]:
    """Seed torch on one thread without progress bars, and give the caller's state of these back afterwards."""
    num_threads, progress_bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(num_threads)
        if progress_bars:
            transformers_logging.enable_progress_bar()


def prepare(
    directory: str | Path,
    seed: int = 0,
    *,
    num_prompts: int = 8000,
    mistake_rate: float = MISTAKE_RATE,
    report: Callable[[str], None] = lambda _: None,
) -> PreparedExample:
    """Write the example into `directory`, which must be new or empty; the same seed gives the same bytes.

    `report` receives progress lines. The folder appears whole or not at all.
    Raises `SettingsError` for a folder, seed or number that can't be used.
    """
    target = Path(directory).absolute()
    limit = NUM_QUESTIONS // 2
    if not 0 <= seed < 2**32:
        raise SettingsError(f"--seed is {seed}, allowed: 0 to {2**32 - 1}.", next_step="Choose another seed.")
    if not 0 <= mistake_rate < 1:
        raise SettingsError(
            f"--mistake-rate is {mistake_rate}, allowed: 0 to below 1.", next_step="Choose another rate."
        )
    if not 1 <= num_prompts <= limit:
        raise SettingsError(
            f"--num-prompts is {num_prompts}, allowed: 1 to {limit}.", next_step="Choose another number."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"--output {target} exists and is not an empty folder.", next_step="Name a new folder.")
    rng = random.Random(seed)
    numbers = rng.sample(range(NUM_QUESTIONS), NUM_QUESTIONS)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _own_state(seed):
            model = build_model()
            exact_match, warm_steps = warm_start(model, iter(numbers[num_prompts:]), rng, mistake_rate, report)
            model.save_pretrained(staging / "model")
        build_tokenizer().save_pretrained(staging / "model")
        lines = [json.dumps(question(number)) + "\n" for number in numbers[:num_prompts]]
        (staging / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        staging.chmod(0o755)
        staging.replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    report(f"wrote {target / 'model'} and {target / 'prompts.jsonl'} ({num_prompts} prompts)")
    return PreparedExample(target / "model", target / "prompts.jsonl", exact_match, warm_steps)


def main(argv: list[str] | None = None) -> int:
    """Command line: `python examples/reverse/prepare.py --output DIR --seed 0`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=8000)
    parser.add_argument(
        "--mistake-rate",
        type=float,
        default=MISTAKE_RATE,
        help=f"share of wrong digits in the demonstrations of the warm start (default {MISTAKE_RATE})",
    )
    args = parser.parse_args(argv)
    try:
        prepare(
            args.output,
            args.seed,
            num_prompts=args.num_prompts,
            mistake_rate=args.mistake_rate,
            report=lambda line: print(line, flush=True),
        )
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
