"""Every family of models computes what transformers computes, and its weights come back as they went in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_families import FAMILIES
from vime.models.families import FAMILIES as SHAPES
from vime.models.weight_names import SUPPORTED_MODEL_TYPES

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(1, ["families"], "family_worker.py")["families"]


def test_every_supported_type_has_a_shape_and_is_compared_here() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SUPPORTED_MODEL_TYPES) <= set(SHAPES)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(one_rank: dict[str, Any], name: str) -> None:
    found = one_rank[name]
    assert found["spread"] > 0.1, "the model is too flat to tell errors"
    assert found["relative"] < 2e-5
    assert found["packed_to_alone"] < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_back_bit_equal(one_rank: dict[str, Any], name: str) -> None:
    assert one_rank[name]["bit_equal"]
