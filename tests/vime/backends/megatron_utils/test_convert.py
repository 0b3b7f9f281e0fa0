"""Checkpoints of every family, format and layout: converted, gathered and loaded without a bit changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_families import FAMILIES

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

WORKER = "convert_worker.py"
FORMATS = ("torch_dist", "torch")
ON_TWO_RANKS = (
    "tensor",
    "tensor_latent",
    "pipeline_latent",
    "virtual",
    "experts",
    "experts_latent",
    "context",
)
ON_FOUR_RANKS = (
    "tensor_pipeline_latent",
    "tensor_virtual",
    "experts_of_tensor_ranks",
    "cut_experts",
    "pipeline_experts",
)


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    jobs = ["round_trips", "further_layers", "between_megatron_formats", "megatron_reads_torch", "refusals"]
    return run_world(1, jobs, WORKER, 500)


@pytest.fixture(scope="module")
def quick(run_world: Any) -> dict[str, Any]:
    return run_world(2, ["tensor_latent"], WORKER, 300)


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, list(ON_TWO_RANKS), WORKER, 500)


@pytest.fixture(scope="module")
def four_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(4, list(ON_FOUR_RANKS), WORKER, 500)


ROUND_TRIPS = [*((name, "torch_dist") for name in FAMILIES), ("qwen2", "torch"), ("deepseek_v3", "torch")]


@pytest.mark.parametrize(("name", "to"), ROUND_TRIPS)
def test_there_and_back_changes_no_bit_and_no_logit(one_rank: dict[str, Any], name: str, to: str) -> None:
    found = one_rank["round_trips"][f"{name}_{to}"]
    assert found["bit_equal"]
    assert found["digests_equal"]
    assert 0 < found["logits"] < 1e-5
    assert found["files_kept"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_layer_for_further_tokens_comes_back_and_may_be_left_out(one_rank: dict[str, Any], to: str) -> None:
    assert one_rank["further_layers"][to] == {
        "bit_equal": True,
        "digests_equal": True,
        "without_it": "nothing",
        "loaded": True,
        "saved": True,
    }


def test_a_layer_for_further_tokens_is_converted_where_it_is_and_its_copies_are_checked(
    one_rank: dict[str, Any],
) -> None:
    found = one_rank["further_layers"]
    assert found["kept"] == [], "config.json tells of a layer that the files don't have"
    assert found["bare"] == ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    assert "model.layers.3.shared_head.head.weight differs from lm_head.weight, allowed: the same" in found["changed"]
    assert "missing weights: model.layers.3.eh_proj.weight" in found["torn"]


def test_one_megatron_format_becomes_the_other(one_rank: dict[str, Any]) -> None:
    assert one_rank["between_megatron_formats"]["digests_equal"]


def test_megatrons_own_loader_takes_the_torch_format(one_rank: dict[str, Any]) -> None:
    assert one_rank["megatron_reads_torch"] == {"bit_equal": True, "version": 3.0, "iteration": 0, "layers": 2}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("missing", ["ModelError", "missing weights: model.layers.1.mlp.down_proj.weight; unexpected weights: none"]),
        ("unknown", ["ModelError", "unexpected weights: model.layers.1.mlp.extra.weight", "config.json belongs"]),
        ("shape", ["ModelError", "model.layers.1.mlp.down_proj.weight: [64, 90], allowed: [64, 96]"]),
        ("parts", ["ModelError", "don't go together", "model.layers.0.mlp.up_proj.weight (96, 60)"]),
        ("dtype", ["ModelError", "model.layers.1.mlp.down_proj.weight is I8, allowed: F32, BF16"]),
        (
            "mixed",
            ["ModelError", "decoder.layers.mlp.linear_fc2.weight has the dtypes torch.float32 and torch.float16"],
        ),
        ("further", ["ModelError", "layers for further tokens", "model.layers.2.eh_proj.weight"]),
        ("taken", ["SettingsError", "taken exists, and nothing is overwritten"]),
        ("same", ["SettingsError", "is a Hugging Face folder already"]),
        ("damaged", ["CorruptDataError", "model.norm.weight read back differ from what was written"]),
        ("logits", ["CorruptDataError", "logits differ by 5.0e-01 of the largest", "allowed: 1e-04"]),
    ],
)
def test_what_cannot_be_converted_is_said_by_name(one_rank: dict[str, Any], name: str, parts: list[str]) -> None:
    said = one_rank["refusals"][name]
    assert [part for part in parts if part not in said] == [], said


def test_a_conversion_that_failed_leaves_nothing(one_rank: dict[str, Any]) -> None:
    assert one_rank["refusals"]["left"] == ""


@pytest.mark.slow
def test_memory_holds_a_few_layers_of_many(run_world: Any) -> None:
    """In units of a layer, of 32; two of them are parts of files that stay mapped."""
    found = run_world(1, ["memory"], WORKER, 500)["memory"]
    assert max(found.values()) < 8, found


def assert_same_under_layout(found: dict[str, Any]) -> None:
    assert found["stream"], "names, their order and every bit are those of one rank"
    assert found["exported"]
    assert found["held"] <= 4, "in units of the largest tensor: a gathered pair and its parts"
    assert found["saved"] == dict.fromkeys(FORMATS, True)
    assert found["loaded"] == dict.fromkeys(FORMATS, True)
    assert found["by_megatron"]


def test_two_ranks_stream_save_and_load_what_one_rank_does(quick: dict[str, Any]) -> None:
    assert_same_under_layout(quick["tensor_latent"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_every_layout_of_two_ranks_streams_saves_and_loads_alike(two_ranks: dict[str, Any], layout: str) -> None:
    assert_same_under_layout(two_ranks[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ON_FOUR_RANKS)
def test_every_layout_of_four_ranks_streams_saves_and_loads_alike(four_ranks: dict[str, Any], layout: str) -> None:
    assert_same_under_layout(four_ranks[layout])
