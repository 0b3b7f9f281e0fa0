"""Tiny Qwen3 checkpoints and a character tokenizer, made from a seed in well under a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHARACTERS = list("0123456789abcdefghijklmnopqrstuvwxyz+-*=>:,. ()")
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def token_text(token_id: int) -> str:
    """Text of one token of the character tokenizer."""
    return [*SPECIAL_TOKENS, *CHARACTERS][token_id]


def build_tokenizer(folder: Path) -> Any:
    """Write a tokenizer with one token per character into `folder` and return it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    return wrapped


def build_tiny_qwen3(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    init_std: float = 0.02,
    vocab_size: int = VOCAB_SIZE,
    num_experts: int | None = None,
    **overrides: Any,
) -> Path:
    """Write a 2-layer Qwen3 (hidden 128) with tokenizer as a float32 Hugging Face checkpoint; returns `folder`.

    `init_std` is the spread of the weights: the default gives a model that is nearly uniform, 0.08 one whose logits
    differ enough for numerical comparisons. With `num_experts` every layer is a mixture of that many experts, two of
    which serve a token (Qwen3-MoE). `overrides` are fields of the configuration.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
    } | overrides
    if num_experts is not None:
        shape = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64} | shape
    config = (Qwen3Config if num_experts is None else Qwen3MoeConfig)(
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attention_dropout=0.0,
        dtype="float32",
        **shape,
    )
    with torch.random.fork_rng():
        model = (Qwen3ForCausalLM if num_experts is None else Qwen3MoeForCausalLM)(config).eval()
    write_randomised(model, folder, seed, init_std)
    return folder


def write_randomised(model: Any, folder: Path, seed: int, init_std: float) -> None:
    """Write a model of transformers and a tokenizer; its weights, biases and norms become such that all differ."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = [*model.named_parameters(), *(pair for pair in model.named_buffers() if "correction_bias" in pair[0])]
    with torch.no_grad():
        for name, tensor in weights:
            spread, centre = (0.1, 1.0) if "norm" in name else (init_std, 0.0)
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread + centre)
    model.save_pretrained(folder)
    build_tokenizer(folder)
