"""The critic of ppo: against a dense reference, through checkpoints, by turns with the actor, under every layout."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

WORKER = "critic_worker.py"
LAYOUTS = ("data_distributed", "tensor", "sequence", "pipeline", "pipeline_tied", "context")


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    scenarios = ["critic_matches_dense_reference", "critic_reads", "critic_resumes", "critic_starts_from", "turns"]
    return run_world(1, scenarios, WORKER)


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, list(LAYOUTS), WORKER, 500)


@pytest.mark.parametrize("aggregation", ["per_rollout", "per_token"])
def test_values_targets_loss_and_every_gradient_equal_the_dense_float64_reference(
    one_rank: dict[str, Any], aggregation: str
) -> None:
    found = one_rank["critic_matches_dense_reference"][aggregation]
    assert 0.1 < found["value_clipfrac"] < 0.95, "some values must have moved too far and others not"
    assert found["largest_gradient"] > 1e-2
    assert found["values"] < 1e-5
    assert found["targets"] < 1e-5
    assert found["gradients"] < 1e-5
    assert found["metrics"] < 1e-5


def test_a_critic_reads_no_routes(one_rank: dict[str, Any]) -> None:
    found = one_rank["critic_reads"]
    assert found["whole"] == 0
    assert found["narrow"] == 2 * found["batches"], "the value pass and the step"


def test_a_resumed_critic_goes_on_bit_by_bit(one_rank: dict[str, Any]) -> None:
    found = one_rank["critic_resumes"]
    assert (found["metrics"], found["weights"], found["actor"]) == (0.0, 0.0, 0.0)
    assert found["folders"] == ["critic"], "one folder holds what one commit commits"


def test_a_checkpoint_without_a_critic_is_refused(one_rank: dict[str, Any]) -> None:
    said = one_rank["critic_resumes"]["said"]
    assert said.startswith("RestoreError")
    assert "iter_0000002/critic is absent: the checkpoint was saved by a run without a critic" in said


def test_an_untrained_critic_expects_nothing(one_rank: dict[str, Any]) -> None:
    assert one_rank["critic_starts_from"]["head_starts_at_zero"]
    assert one_rank["critic_starts_from"]["moved"] > 1e-3


@pytest.mark.parametrize("source", ["hugging_face", "actor", "critic", "commit"])
def test_a_critic_starts_from_what_its_load_names(one_rank: dict[str, Any], source: str) -> None:
    assert one_rank["critic_starts_from"][source] == 0.0


def test_a_critics_load_that_is_no_checkpoint_is_named(one_rank: dict[str, Any]) -> None:
    said = one_rank["critic_starts_from"]["said"]
    assert said.startswith("RestoreError: the critic's load")
    assert "nowhere holds neither *.safetensors nor" in said


@pytest.mark.parametrize("optimizer", ["plain", "distributed", "bf16"])
def test_memory_that_is_moved_out_and_back_changes_no_bit_of_the_training(
    one_rank: dict[str, Any], optimizer: str
) -> None:
    found = one_rank["turns"][optimizer]
    assert found["same_metrics"]
    assert (found["critic"], found["actor"]) == (0.0, 0.0)
    actor, critic = found["places"]
    assert actor > 0, "the actor was the last to work"
    assert critic == 0
    assert found["bytes_left"] > 3 * found["parameter_bytes"], "weights, gradients and both moments have to leave"
    assert found["still_there"] == 0
    assert found["left_twice"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_actor_and_critic_train_like_on_one_rank_and_resume_there(two_ranks: dict[str, Any], layout: str) -> None:
    found = two_ranks[layout]
    assert found["moved"] > 1e-2
    assert found["weights"] < 1e-5
    assert found["actor"] < 1e-5
    assert found["metrics"] < 3e-5
    assert found["resumed"] < 3e-5
