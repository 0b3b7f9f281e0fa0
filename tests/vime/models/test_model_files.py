"""The files in scripts/models, held to transformers' config classes and to the installed Megatron."""

import re
from pathlib import Path

import pytest

from vime.models.rows import Shape
from vime.models.shape import config_of_shape, refuse_contradictions, shape_argv, shape_of_argv, shape_of_config
from vime.settings.script.reader import read_launch_script

FILES = sorted((Path(__file__).parents[3] / "scripts" / "models").glob("*.sh"))
PARAMETERS_IN_BILLIONS = {
    "deepseek-v3": 671.0, "glm4-9B": 9.4, "llama3.1-70B": 70.6, "llama3.1-8B": 8.03, "llama3.2-1B": 1.24,
    "qwen2.5-0.5B": 0.49, "qwen2.5-1.5B": 1.54, "qwen2.5-32B": 32.8, "qwen2.5-7B": 7.62, "qwen3-0.6B": 0.6,
    "qwen3-235B-A22B": 235.0, "qwen3-30B-A3B": 30.5, "qwen3-32B": 32.8, "qwen3-4B": 4.0, "qwen3-8B": 8.2,
}  # fmt: skip
"""As their publishers state them."""


def model_args(file: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """Model type and flags of a file, as a launch script that sources it gets them."""
    script = tmp_path / "run.sh"
    script.write_text(f'source "{file}"\npython3 train.py ${{MODEL_ARGS[@]}}\n')
    found = re.search(r"\((\w+)\)", file.read_text().splitlines()[0])
    assert found is not None
    launch = read_launch_script(script)
    assert launch.notes == []
    return found[1], [word.text for word in launch.words]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_agrees_with_its_familys_config_class_in_both_directions(file: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    model_type, argv = model_args(file, tmp_path)
    given = shape_of_argv(model_type, argv)
    entries = config_of_shape(model_type, given)
    config = AutoConfig.for_model(**entries).to_dict()
    derived = shape_of_config(config)
    derived.pop("--max-position-embeddings")
    assert derived == given
    refuse_contradictions(config, argv)
    again = config_of_shape(model_type, derived)
    assert again == entries


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_installed_megatron_parses_what_is_written_and_what_is_derived(file: Path, tmp_path: Path) -> None:
    from vime.backends.megatron_utils import arguments

    model_type, argv = model_args(file, tmp_path)
    parser = arguments.megatron_parser()
    written, derived = parser.parse_args(argv), parser.parse_args(shape_argv(shape_of_argv(model_type, argv)))
    assert written.num_layers == derived.num_layers
    assert written.layernorm_epsilon == derived.layernorm_epsilon
    assert written.rotary_base == derived.rotary_base


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_has_as_many_parameters_as_its_publisher_states(file: Path, tmp_path: Path) -> None:
    model_type, argv = model_args(file, tmp_path)
    counted = num_parameters(shape_of_argv(model_type, argv)) / 1e9
    assert counted == pytest.approx(PARAMETERS_IN_BILLIONS[file.stem], rel=0.02)


def num_parameters(shape: Shape) -> int:
    """Weights of embedding, head, attention and MLPs; norms and biases are too few to count."""
    hidden, layers = int(shape["--hidden-size"]), int(shape["--num-layers"])
    heads = int(shape["--num-attention-heads"])
    tables = int(shape["--vocab-size"]) * hidden * (1 + ("--untie-embeddings-and-output-weights" in shape))
    if "--multi-latent-attention" in shape:
        ranks = int(shape["--q-lora-rank"]), int(shape["--kv-lora-rank"])
        nope, rope, value = (int(shape[f"--{name}-head-dim"]) for name in ("qk", "qk-pos-emb", "v"))
        attention = hidden * sum(ranks) + ranks[0] * heads * (nope + rope) + hidden * rope
        attention += ranks[1] * heads * (nope + value) + heads * value * hidden
    else:
        channels = int(shape["--kv-channels"])
        attention = 2 * hidden * channels * (heads + int(shape["--num-query-groups"]))
    dense_mlp, num_dense = 3 * hidden * int(shape["--ffn-hidden-size"]), layers
    expert_mlp = 0
    if "--num-experts" in shape:
        num_dense = 3 if "--moe-layer-freq" in shape else 0
        width = int(shape["--num-experts"]) * int(shape["--moe-ffn-hidden-size"])
        expert_mlp = 3 * hidden * (width + int(shape.get("--moe-shared-expert-intermediate-size", 0)))
    return tables + layers * attention + num_dense * dense_mlp + (layers - num_dense) * expert_mlp
