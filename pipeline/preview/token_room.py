"""Whether a prompt and its response fit into a microbatch, by the first prompts' tokens. Loads no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.data.cursor import PromptTask
from vime.rollout.tokenizer import read_tokenizer_file
from vime.settings.groups import Settings
from vime.settings.rules.quantities import context_parallel_size


@dataclass(frozen=True)
class TokenRoom:
    """What a sample may have, and the shortest and the longest of the prompts that were counted, in tokens."""

    allowed: int
    shortest_prompt: int
    longest_prompt: int
    response: int
    """The longest that the flags allow beside the longest prompt."""

    @property
    def fits_nothing(self) -> bool:
        """Whether no sample can be trained: even one token after the shortest prompt is too many."""
        return self.shortest_prompt + 1 > self.allowed

    @property
    def may_overflow(self) -> bool:
        return self.longest_prompt + self.response > self.allowed

    @property
    def words(self) -> str:
        prompts = (
            f"The first prompts have {self.shortest_prompt} to {self.longest_prompt} tokens"
            if self.shortest_prompt != self.longest_prompt
            else f"The first prompts have {self.longest_prompt} tokens"
        )
        return (
            f"{prompts}, their responses up to {self.response}, and --max-tokens-per-gpu allows {self.allowed} together"
        )


def token_room(settings: Settings, prompts: Sequence[PromptTask]) -> TokenRoom | None:
    """None where nothing limits a sample, or where the prompts' tokens can't be counted without a chat template.

    Raises `ModelError` for a damaged tokenizer.
    """
    trainer, rollout = settings.trainer, settings.rollout
    texts = [task.prompt for task in prompts if isinstance(task.prompt, str)]
    if not trainer.use_dynamic_batch_size or trainer.max_tokens_per_gpu is None or settings.data.apply_chat_template:
        return None
    counts = _counts(Path(settings.checkpoint.hf_checkpoint or ""), texts)
    if not counts or len(texts) < len(prompts):
        return None
    response = rollout.rollout_max_response_len or 1
    if rollout.rollout_max_context_len is not None:
        response = max(1, min(response, rollout.rollout_max_context_len - max(counts)))
    allowed = trainer.max_tokens_per_gpu * context_parallel_size(settings)
    return TokenRoom(allowed, min(counts), max(counts), response)


def _counts(checkpoint: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text; none where the tokenizer has no file of its own."""
    loaded = read_tokenizer_file(checkpoint)
    if loaded is None:
        return []
    return [len(loaded.encode(text, add_special_tokens=False).ids) for text in texts]
