"""How the work of training on a sequence grows with its length."""

from __future__ import annotations

from vime.models.rows import Config, positive


def linear_work(config: Config) -> float:
    """c in L * (c + L), to which the multiplications for a sequence of L tokens are proportional.

    A token takes as many multiplications as there are parameters that it passes, and 2 L times the width of the
    attention heads in each layer for the scores and values of those before it, half of which the causal mask leaves
    out. `config` is a parsed `config.json`; attention with low-rank projections counts as if it had none.

    Raises:
        ModelError: an entry that every model has is missing.
    """
    hidden, layers = positive(config, "hidden_size"), positive(config, "num_hidden_layers")
    heads = positive(config, "num_attention_heads")
    head_size = _or(config, "head_dim", hidden // heads)
    query_width, key_width = heads * head_size, _or(config, "num_key_value_heads", heads) * head_size
    attention = 2 * hidden * (query_width + key_width)
    feed_forward = 3 * hidden * _active_feed_forward_width(config)
    head = hidden * positive(config, "vocab_size")
    return (layers * (attention + feed_forward) + head) / (layers * query_width)


def _active_feed_forward_width(config: Config) -> int:
    """Of the experts that one token passes, or of the dense layer."""
    active = _or(config, "num_experts_per_tok", 0)
    if not active:
        return positive(config, "intermediate_size")
    return (active + _or(config, "n_shared_experts", 0)) * positive(config, "moe_intermediate_size")


def _or(config: Config, key: str, default: int) -> int:
    return positive(config, key) if config.get(key) else default
