"""The trainer on samples whose candidates or nuclei were recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, pack
from tests.vime.backends.megatron_utils.tiny_recorded import pack_recorded
from vime.backends.megatron_utils.recorded import check_recorded
from vime.errors import TrainerError


@pytest.fixture(scope="module")
def top_k(run_world: Any) -> dict[str, Any]:
    return run_world(2, ["centered_top_k"])["centered_top_k"]


@pytest.fixture(scope="module")
def nucleus(run_world: Any) -> dict[str, Any]:
    return run_world(2, ["centered_nucleus"])["centered_nucleus"]


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(1, ["replayed_nuclei"])["replayed_nuclei"]


@pytest.mark.multiproc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["data", "tensor"])
@pytest.mark.parametrize("kind", ["top_k", pytest.param("nucleus", marks=pytest.mark.slow)])
def test_two_ranks_centre_scores_like_one(request: pytest.FixtureRequest, kind: str, layout: str) -> None:
    found = request.getfixturevalue(kind)[layout]
    assert found["moved"] > 1e-3
    assert found["weights"] < 2e-6
    assert found["metrics"] < 3e-5
    trained = 6 / 7  # of the rollouts; the other is wholly masked and counts as zero
    assert found["reported"]["sc_sampler_head_mass"] == pytest.approx(trained * (0.6 if kind == "top_k" else 1.0))
    assert 0 < found["reported"]["sc_train_head_mass"] < 1
    assert abs(found["reported"]["sc_correction"]) > 1e-3


@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_log_probs_keep_to_the_nucleus_only_where_asked_and_recorded(one_rank: dict[str, Any]) -> None:
    assert one_rank["unrecorded"] > 0
    assert one_rank["kept"] < 1e-6
    assert one_rank["higher"]
    assert one_rank["raised"] > 1


@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_a_step_without_recorded_tokens_is_refused(one_rank: dict[str, Any]) -> None:
    assert "neither candidates nor a nucleus" in one_rank["said"]["absent"]
    assert one_rank["said"]["without_token"].startswith("TrainerError: sample 100: the recorded nucleus of the trained")


def test_a_trained_token_outside_of_its_nucleus_is_refused_with_both() -> None:
    sequences = make_sequences(5)
    packed = pack_recorded("nucleus", sequences, [4, 7])
    nucleus = packed.nucleus
    assert nucleus is not None
    check_recorded(packed)
    row = 28 + int(np.flatnonzero(sequences[7].loss_mask)[1])
    ids = nucleus.ids.copy()
    ids[nucleus.offsets[row] : nucleus.offsets[row + 1]] = 60
    token = int(sequences[7].tokens[3 + row - 28])
    with pytest.raises(TrainerError) as caught:
        check_recorded(replace(packed, nucleus=replace(nucleus, ids=ids)))
    assert f"sample 107: the recorded nucleus of the trained token {token} holds [60" in str(caught.value)


def test_masked_tokens_need_no_nucleus() -> None:
    packed = pack_recorded("nucleus", make_sequences(5), range(8))
    assert packed.nucleus is not None
    assert (np.diff(packed.nucleus.offsets)[packed.loss_mask == 0] == 0).any()
    check_recorded(packed)


def test_a_batch_without_anything_recorded_is_refused() -> None:
    packed = pack(make_sequences(5), [1, 2])
    with pytest.raises(TrainerError, match="samples 101, 102 have neither candidates nor a nucleus"):
        check_recorded(packed)
    kept = pack_recorded("nucleus", make_sequences(5), [1, 2])
    assert kept.nucleus is not None
    with pytest.raises(TrainerError, match="which score centering needs"):
        check_recorded(replace(kept, nucleus=replace(kept.nucleus, log_probs=None)))
