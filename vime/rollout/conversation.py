"""Conversations as token ids and a loss mask, for supervised fine-tuning (--loss-mask-type).

Trained are the tokens that a model would have generated: what follows the generation prompt of each assistant turn, up
to and with the token that ends it. A turn whose `step_loss_mask` is 0 is not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from vime.errors import SampleError

Message = dict[str, Any]
_PROBE: Message = {"role": "user", "content": "probe"}


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token: str | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> str: ...


@dataclass(frozen=True)
class _Piece:
    """Text that is tokenised by itself."""

    text: str
    is_trained: bool = False


def encode_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], mask_type: str, tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """(token ids [T], loss mask [T] of zeros and ones).

    `mask_type` qwen takes the template's rendering of the whole conversation. qwen3 and qwen3_5 render each assistant
    turn as if it were the newest, because these templates drop the reasoning of older ones. distill_qwen trains the
    last turn alone, as the text that it has.

    Raises `SampleError` for a conversation without an assistant turn, a `step_loss_mask` that is neither 0 nor 1, or
    what the template refuses or renders otherwise than `mask_type` says.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise SampleError(
            "the conversation has no assistant turn, allowed: at least one.",
            next_step="Name the field with the whole conversation with --input-key, or the answer with --label-key.",
            reason="no_assistant_turn",
        )
    render = _renderer(tokenizer, tools)
    token_ids: list[int] = []
    mask: list[int] = []
    for piece in _PIECES[mask_type](render, [_without_mask(message) for message in messages], tokenizer.eos_token):
        ids = tokenizer.encode(piece.text, add_special_tokens=False)
        token_ids += ids
        mask += _trained(tokenizer, ids) if piece.is_trained else [0] * len(ids)
    return token_ids, mask


_Render = Callable[..., str]
"""(messages, add_generation_prompt=False) to text."""


def _renderer(tokenizer: ChatTokenizer, tools: list[Any] | None) -> _Render:
    def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise SampleError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}.", reason="chat_template"
            ) from error

    return render


def _without_mask(message: Message) -> tuple[Message, bool]:
    """(the message for the template, whether it may be trained)."""
    step = message.get("step_loss_mask", 1)
    if step not in (0, 1):
        raise SampleError(f"step_loss_mask is {step!r}, allowed: 0 or 1.", reason="step_loss_mask")
    kept = {key: value for key, value in message.items() if key != "step_loss_mask"}
    return kept, step == 1 and message["role"] == "assistant"


_Turns = Sequence[tuple[Message, bool]]


def _whole(render: _Render, turns: _Turns, _: str | None) -> list[_Piece]:
    """Pieces of the one rendering, each what a further message adds to it."""
    pieces: list[_Piece] = []
    messages = [message for message, _ in turns]
    before = ""
    for stop in range(1, len(messages) + 1):
        is_assistant = messages[stop - 1]["role"] == "assistant"
        if not is_assistant and stop < len(messages) and messages[stop]["role"] != "assistant":
            continue  # rendered with those that follow: a template may want a whole prompt
        text = render(messages[:stop])
        added = _after(text, before)
        if is_assistant:
            prompt = _after(render(messages[: stop - 1], add_generation_prompt=True), before)
            pieces += _assistant_pieces(added, prompt, is_trained=turns[stop - 1][1])
        else:
            pieces.append(_Piece(added))
        before = text
    return pieces


def _turn_by_turn(render: _Render, turns: _Turns, _: str | None) -> list[_Piece]:
    """Each block of other messages, and each assistant turn, after a probe that is cut off again."""
    probe = render([_PROBE])
    prompt = _after(render([_PROBE], add_generation_prompt=True), probe)
    messages = [message for message, _ in turns]
    head = int(messages[0]["role"] == "system")
    opening = render([*messages[:head], _PROBE])
    bare = _bare(render)
    pieces = [_Piece(opening.removesuffix(bare))] if opening != bare else []
    block: list[Message] = []
    for message, is_trained in turns[head:]:
        if message["role"] != "assistant":
            block.append(message)
            continue
        if block:
            pieces.append(_Piece(_after(render([_PROBE, *block]), probe)))
            block = []
        pieces += _assistant_pieces(_after(render([_PROBE, message]), probe), prompt, is_trained=is_trained)
    return [*pieces, _Piece(_after(render([_PROBE, *block]), probe))] if block else pieces


def _bare(render: _Render) -> str:
    """A user's turn without what the template puts before the first one."""
    once = render([_PROBE])
    return _after(render([_PROBE, _PROBE]), once)


def _last_answer(render: _Render, turns: _Turns, eos: str | None) -> list[_Piece]:
    (answer, is_trained), *_ = reversed(turns)
    if answer["role"] != "assistant":
        raise SampleError("the last message is not the assistant's, allowed: one that is.", reason="no_assistant_turn")
    prompt = render([message for message, _ in turns[:-1]], add_generation_prompt=True)
    opened = "<think>\n"
    text = str(answer["content"])
    if prompt.endswith(opened):
        text = text.removeprefix(opened)
    return [_Piece(prompt), _Piece(text + (eos or ""), is_trained)]


_PIECES: dict[str, Callable[[_Render, _Turns, str | None], list[_Piece]]] = {
    "qwen": _whole,
    "qwen3": _turn_by_turn,
    "qwen3_5": _turn_by_turn,
    "distill_qwen": _last_answer,
}


def _assistant_pieces(text: str, prompt: str, *, is_trained: bool) -> list[_Piece]:
    return [_Piece(prompt), _Piece(_after(text, prompt), is_trained)]


def _after(text: str, before: str) -> str:
    if not text.startswith(before):
        raise SampleError(
            f"the chat template renders {text[:80]!r} where {before[-80:]!r} was to be continued, allowed: the same "
            "beginning.",
            next_step="Choose another --loss-mask-type; qwen3 fits templates that change older turns.",
            reason="chat_template",
        )
    return text[len(before) :]


def _trained(tokenizer: ChatTokenizer, ids: list[int]) -> list[int]:
    """Ones, but for white space that the template puts after the token that ends a turn."""
    last = max((position for position, token in enumerate(ids) if token in tokenizer.all_special_ids), default=None)
    if last is None or tokenizer.decode(ids[last + 1 :], skip_special_tokens=False).strip():
        return [1] * len(ids)
    return [1] * (last + 1) + [0] * (len(ids) - last - 1)
