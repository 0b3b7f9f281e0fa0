"""Whether prompts survive the tokenizer: text to ids, to text, to the same ids."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.doctor.check import Check, failed, passed, warned
from vime.counted import agreeing, counted
from vime.data.cursor import PromptTask
from vime.errors import SampleError
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.settings.groups import Settings

NAME = "tokenizer"


def round_trip(
    settings: Settings, tokenizer: Tokenizer, prompts: Sequence[PromptTask], most_tokens: int | None = None
) -> Check:
    """Encode the prompts as the run does, decode, encode again, and compare.

    Text that reads otherwise after the trip is worth a warning; ids that differ are a failure, since a second turn
    would then be trained on tokens that were never sampled. A prompt that leaves no room for a response within
    `most_tokens` (of prompt and response together) is a failure too.
    """
    data = settings.data
    prompt_text = PromptText(
        tokenizer, apply_chat_template=data.apply_chat_template, template_kwargs=data.apply_chat_template_kwargs
    )
    changed = 0
    for prompt in prompts:
        try:
            text = prompt_text.render(prompt.prompt, prompt.metadata)
        except SampleError as error:
            return failed(NAME, f"Row {prompt.row} can't be rendered: {error}", "Check --apply-chat-template.")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            return failed(
                NAME,
                f"Row {prompt.row}: {text[:40]!r} has no token.",
                "Use the tokenizer that belongs to the model; check its files in --hf-checkpoint.",
            )
        if most_tokens is not None and len(ids) >= most_tokens:
            return failed(
                NAME,
                f"Row {prompt.row}: the prompt has {counted(len(ids), 'token')}, prompt and response together may have "
                f"{most_tokens} (the least of the model's positions and the flags).",
                "Shorten or remove such prompts, or use a model or flags with a longer context.",
            )
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        again = tokenizer.encode(decoded, add_special_tokens=False)
        if again != ids:
            return failed(
                NAME,
                f"Row {prompt.row}: {len(ids)} ids become {len(again)} others after decoding ({text[:40]!r} reads "
                f"{decoded[:40]!r}).",
                "Use the tokenizer that belongs to the model; check its files in --hf-checkpoint.",
            )
        changed += decoded != text
    if changed:
        return warned(
            NAME,
            f"{changed} of {len(prompts)} prompts read otherwise after encoding and decoding; their ids stay the same.",
            "Check that the tokenizer knows every character of the prompts.",
        )
    return passed(NAME, f"{counted(len(prompts), 'prompt')} {agreeing(len(prompts), 'comes')} back the same")
