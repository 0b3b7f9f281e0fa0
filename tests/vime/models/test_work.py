"""How work grows with the length of a sequence."""

import pytest

from vime.errors import ModelError
from vime.models.work import linear_work

DENSE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 20,
    "vocab_size": 50,
}


def test_work_of_a_dense_model_is_its_parameters_over_the_width_of_its_heads() -> None:
    queries_and_output, keys_and_values, feed_forward = 2 * 8 * 12, 2 * 8 * 6, 3 * 8 * 20
    layers = 2 * (queries_and_output + keys_and_values + feed_forward)
    assert linear_work(DENSE) == (layers + 8 * 50) / (2 * 12)


def test_work_of_experts_counts_those_that_a_token_passes() -> None:
    experts = {**DENSE, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 5}
    assert linear_work(experts) == linear_work(DENSE)
    assert linear_work({**experts, "n_shared_experts": 1}) > linear_work(experts)


def test_heads_share_the_hidden_size_when_the_config_does_not_say_theirs() -> None:
    bare = {key: value for key, value in DENSE.items() if key not in ("head_dim", "num_key_value_heads")}
    assert linear_work(bare) == linear_work({**DENSE, "head_dim": 2, "num_key_value_heads": 4})


def test_a_config_without_sizes_is_refused_with_the_entry() -> None:
    with pytest.raises(ModelError, match="hidden_size is None"):
        linear_work({})
