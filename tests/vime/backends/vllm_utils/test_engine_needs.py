"""An engine that can't return what the objective needs is refused by name, with its version and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.protocol import NO_COLUMNS, EngineCapabilities, SampleColumns
from vime.errors import EngineStartError

ABLE = EngineCapabilities(
    engine_version="0.32.0", model="m", max_model_len=64, world_size=1, token_in_generate=True, pause_keep=True,
    version_spans=True, cache_salt=True, weight_transfer=True, columns=True, max_candidates=20, routed_experts=True,
    nucleus=True,
    sleep=True,
)  # fmt: skip
WITHOUT = replace(ABLE, columns=False, max_candidates=0, routed_experts=False, nucleus=False)


def test_an_able_engine_passes_and_any_engine_does_where_nothing_is_needed() -> None:
    check_engine("http://a", ABLE, SampleColumns(num_candidates=20, routes=True, nucleus=True))
    check_engine("http://a", WITHOUT, NO_COLUMNS)


@pytest.mark.parametrize(
    ("needs", "lacking", "message"),
    [
        (SampleColumns(num_candidates=21), {}, r"21 candidates .* --score-centering-top-k \(it returns 20\)"),
        (SampleColumns(routes=True), {"routed_experts": False}, "routed experts, for --use-rollout-routing-replay"),
        (SampleColumns(nucleus=True), {"nucleus": False}, "the tokens that top-p left, for --rollout-top-p"),
    ],
)
def test_what_an_engine_lacks_is_named_with_its_version(
    needs: SampleColumns, lacking: dict[str, bool], message: str
) -> None:
    with pytest.raises(EngineStartError, match=rf"http://a \(vLLM 0\.32\.0\) can't return {message}") as caught:
        check_engine("http://a", replace(ABLE, **lacking), needs)
    assert caught.value.next_step == "Leave out the flag, or use another vLLM."


def test_a_plug_in_that_vllm_does_not_find_is_told() -> None:
    with pytest.raises(EngineStartError, match="It runs without vime's sample route") as caught:
        check_engine("http://a", WITHOUT, SampleColumns(num_candidates=1))
    assert "install vime again" in caught.value.next_step
