"""Megatron's shape flags from `config.json`, and flags that contradict it."""

from typing import Any

import pytest

from tests.support.seed_model import MODEL_WORDS, QWEN3_4B
from vime.errors import ModelError, SettingsError
from vime.models.families import family_named, named_config
from vime.models.rows import expand_layers, layer_pattern
from vime.models.shape import contradictions, refuse_contradictions, shape_of_argv, shape_of_config


def test_flags_written_out_say_the_same_as_the_config() -> None:
    derived = shape_of_config(QWEN3_4B)
    assert shape_of_argv("qwen3", MODEL_WORDS) == {k: v for k, v in derived.items() if k != "--max-position-embeddings"}
    assert contradictions(QWEN3_4B, MODEL_WORDS) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-layers 24",
            r"--num-layers is 24, but config.json \(num_hidden_layers\) has 36, allowed: 36, or left out.",
        ),
        (
            "--num-layers=24",
            r"--num-layers is 24, but config.json \(num_hidden_layers\) has 36, allowed: 36, or left out.",
        ),
        ("--norm-epsilon 1e-5", r"--norm-epsilon is 1e-05, but config.json \(rms_norm_eps\) has 1e-06, allowed"),
        (
            "--normalization LayerNorm",
            r"--normalization is LayerNorm, but config.json \(model_type\) has RMSNorm, allowed: RMSNorm",
        ),
        (
            "--untie-embeddings-and-output-weights",
            r"is given, but by config.json \(tie_word_embeddings\) the model has",
        ),
        (
            "--add-qkv-bias",
            r"--add-qkv-bias is given, but by config.json \(attention_bias\) the model has none, allowed: left out.",
        ),
        ("--position-embedding-type learned_absolute", "is learned_absolute, but config.json .* has rope"),
        ("--num-layers many", "--num-layers is many, allowed: one whole number"),
        ("--swiglu yes", "--swiglu is yes, allowed: no value"),
    ],
)
def test_a_contradiction_names_flag_given_value_and_configs_value(flags: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        refuse_contradictions(QWEN3_4B, flags.split())
    assert caught.value.next_step


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"(?s)--num-layers is 1.*--hidden-size is 2"):
        refuse_contradictions(QWEN3_4B, ["--num-layers", "1", "--hidden-size", "2"])


def test_lengths_and_flags_that_are_no_shape_are_left_to_megatron() -> None:
    words = "--max-position-embeddings 4096 --seq-length 4096 --tensor-model-parallel-size 2 --num-layers 36"
    assert contradictions(QWEN3_4B, words.split()) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', allowed: qwen2, qwen3,"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: silu"),
        ({"vocab_size": None}, "vocab_size is None, allowed: a whole number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type is 'yarn', allowed: default"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is true"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
         "low_freq_factor is 2.0 in the rope settings, allowed: 1.0"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, "factor is None in the rope settings"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 2}, "dense layers between expert layers"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": False}, "norm_topk_prob is false"),
    ],
)  # fmt: skip
def test_what_megatrons_flags_cannot_express_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=part):
        shape_of_config(QWEN3_4B | change)


def test_layer_patterns_are_read_without_running_them() -> None:
    assert expand_layers("([0]*3+[1]*2)") == expand_layers("[0, 0, 0] + [1]*2") == [0, 0, 0, 1, 1]
    assert layer_pattern([0, 0, 0, 1, 1]) == "([0]*3+[1]*2)"
    with pytest.raises(ValueError, match="is not a layer pattern"):
        expand_layers("__import__('os')")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3_moe", "qwen3_moe"),
        ("Qwen3MoeConfig", "qwen3_moe"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("bert", None),
    ],
)
def test_a_family_is_known_by_its_type_and_by_the_classes_of_transformers(name: str, family: str | None) -> None:
    assert family_named(name) == family
    if family is None:
        with pytest.raises(ModelError, match="--model-name is 'bert', allowed: qwen2"):
            named_config({}, name)
    else:
        assert named_config({"model_type": "own", "hidden_size": 4}, name) == {"model_type": family, "hidden_size": 4}
