"""Records of conversations as samples to train on, without an engine."""

from __future__ import annotations

from typing import Any

from vime.errors import SampleError
from vime.rollout.conversation import ChatTokenizer, encode_conversation
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


class RecordReader:
    """Takes the place of generation in supervised fine-tuning."""

    def __init__(self, tokenizer: ChatTokenizer, mask_type: str, *, apply_chat_template: bool) -> None:
        """`mask_type` is --loss-mask-type; `apply_chat_template` also puts plain text through the template."""
        self._tokenizer, self._mask_type = tokenizer, mask_type
        self._apply_chat_template = apply_chat_template

    async def generate(
        self,
        engine: Any,  # noqa: ARG002
        sample: Sample,
        sampling: SamplingSettings,  # noqa: ARG002
        *,
        cache_salt: str | None,  # noqa: ARG002
        evaluation: bool = False,  # noqa: ARG002
        hand_over: Any = None,  # noqa: ARG002
    ) -> None:
        """Fill tokens, loss mask, response and status of `sample` from its prompt and label; there is no engine.

        The response begins with the first trained token. Raises `SampleError` for a record without one.
        """
        token_ids, mask = self._encoded(sample)
        if 1 not in mask[1:]:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index}: no token of the record is trained, allowed: at "
                "least one after the first.",
                next_step="Look at its step_loss_mask, and at --input-key and --label-key.",
                reason="nothing_trained",
            )
        first = max(1, mask.index(1))
        sample.tokens, sample.loss_mask = token_ids, mask[first:]
        sample.response_length = len(sample.loss_mask)
        sample.response = self._tokenizer.decode(token_ids[first:], skip_special_tokens=True)
        sample.status = Sample.Status.COMPLETED

    def _encoded(self, sample: Sample) -> tuple[list[int], list[int]]:
        """A conversation, its end in the label or not; or a text whose continuation is the label."""
        prompt, label = sample.prompt, sample.label
        if isinstance(prompt, str) and not self._apply_chat_template:
            if not isinstance(label, str):
                raise SampleError(
                    f"sample {sample.index}: the prompt is text and the label {label!r}, allowed: text to train on.",
                    next_step="Name its field with --label-key, or give conversations.",
                    reason="label",
                )
            before, after = (
                self._tokenizer.encode(text, add_special_tokens=False)
                for text in (prompt, label + (self._tokenizer.eos_token or ""))
            )
            return before + after, [0] * len(before) + [1] * len(after)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if isinstance(label, str) and messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": label})
        return encode_conversation(self._tokenizer, messages, self._mask_type, sample.metadata.get("tools"))
