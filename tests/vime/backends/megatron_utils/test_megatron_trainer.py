"""The trainer on one and on two ranks, against Hugging Face, a dense reference and itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(
        1,
        [
            "logits_match_hugging_face",
            "gradients_match_dense_reference",
            "weights_round_trip",
            "resume_and_replay",
            "background_save",
            "weights_only_load",
            "refusals",
            "planted_faults",
        ],
    )


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(
        2,
        [
            "data_parallel",
            "objectives",
            "resume_on_fewer_ranks",
            "background_save",
            "unequal_microbatches",
            "bad_sample_on_other_rank",
        ],
    )


@pytest.fixture(scope="module")
def split_model(run_world: Any) -> dict[str, Any]:
    return run_world(2, ["model_parallel"])["model_parallel"]


@pytest.mark.parametrize("variant", ["tied", "untied", "experts"])
def test_packed_logits_equal_separate_and_hugging_face_logits(one_rank: dict[str, Any], variant: str) -> None:
    found = one_rank["logits_match_hugging_face"][variant]
    assert found["spread"] > 0.5, "the model is too flat to tell packing errors"
    assert found["packed_to_separate"] < 1e-5
    assert found["packed_to_hf"] < 1e-5
    assert found["log_probs"] < 1e-5


@pytest.mark.parametrize("aggregation", ["per_rollout", "per_token"])
def test_loss_and_every_gradient_equal_the_dense_float64_reference(one_rank: dict[str, Any], aggregation: str) -> None:
    found = one_rank["gradients_match_dense_reference"][aggregation]
    assert 0.1 < found["clipfrac"] < 0.9, "the batch must clip some tokens and not others"
    assert found["largest_gradient"] > 1e-3
    assert found["gradients"] < 1e-6
    assert found["metrics"] < 1e-5
    assert found["grad_norm"] < 1e-5


@pytest.mark.parametrize("variant", ["tied", "untied", "experts"])
def test_weights_survive_the_way_into_megatron_and_back_bitwise(one_rank: dict[str, Any], variant: str) -> None:
    assert one_rank["weights_round_trip"][variant] == {"same_names": True, "bitwise": True, "saved": True}


@pytest.mark.parametrize("optimizer", ["plain", "distributed", "growing_decay", "growing_decay_distributed"])
def test_resumed_training_equals_uninterrupted_training(one_rank: dict[str, Any], optimizer: str) -> None:
    found = one_rank["resume_and_replay"][optimizer]
    assert found["folder"] == "iter_0000003"
    assert not found["tracker"], "the newest iteration is recorded by whoever commits it"
    assert found["metrics"] == 0.0
    assert found["weights"] == 0.0
    assert found["learning_rates"] == sorted(set(found["learning_rates"]), reverse=True), "the schedule must go on"


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
@pytest.mark.parametrize("world", ["one_rank", "two_ranks"])
def test_a_checkpoint_in_the_background_holds_what_was_true_when_it_was_begun(
    world: str, optimizer: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(world)["background_save"][optimizer]
    assert found["moved"] > 1e-3, "training must have gone on before the first byte was written"
    assert found["early"] == []
    assert (found["saved"], found["metrics"], found["final"]) == (0.0, 0.0, 0.0)
    assert (found["tracker"], found["whole"]) == ("2", True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_a_step_at_rate_zero_after_loading_weights_alone_keeps_them_bitwise(
    one_rank: dict[str, Any], optimizer: str, precision: str
) -> None:
    found = one_rank["weights_only_load"][f"{optimizer}_{precision}"]
    assert found["moved"] > 1e-3
    assert found["after"] == 0.0


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_checkpoint_of_an_untrained_model_can_be_resumed(one_rank: dict[str, Any], optimizer: str) -> None:
    assert one_rank["resume_and_replay"][optimizer]["from_start"] == 0.0


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_same_steps_replayed_from_one_checkpoint_are_bitwise_equal(one_rank: dict[str, Any], optimizer: str) -> None:
    assert one_rank["resume_and_replay"][optimizer]["replay"] == 0.0


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("flag", ["SettingsError", "--tensor-model-paralel-size", "nearest one is --tensor-model-parallel-size"]),
        ("value", ["SettingsError", "--recompute-granularity", "everything"]),
        ("decay", ["SettingsError", "--lr-decay-style is cosine", "--lr-decay-iters"]),
        ("assertion", ["SettingsError", "Megatron refused the flags: not so: min_lr <= lr."]),
        ("schedule", ["SettingsError", "not so: init_lr <= max_lr", "--lr-warmup-init 1.0", "Correct these flags"]),
        ("names", ["ModelError", "missing weights: model.norm.weight", "model.layers.9.extra.weight"]),
        ("nan", ["TrainerError", "loss is not finite", "rank 0: samples 102, 104", "no weight was changed"]),
        ("empty", ["TrainerError", "rank 0: 0", "above 0"]),
        ("no_checkpoint", ["RestoreError", "iter_0000077", "metadata.json is absent"]),
        ("not_empty", ["TrainerError", "iter_0000001 is not empty"]),
    ],
)
def test_refusals_say_what_was_found_and_what_is_allowed(one_rank: dict[str, Any], name: str, parts: list[str]) -> None:
    said = one_rank["refusals"][name]
    assert [part for part in parts if part not in said] == [], said


def test_refused_step_leaves_weights_alone_and_tracker_is_written_on_request(one_rank: dict[str, Any]) -> None:
    assert one_rank["refusals"]["weights_kept"] == "True"
    assert one_rank["refusals"]["tracker"] == "1"


@pytest.mark.parametrize("fault", ["raw_log_probs", "no_temperature", "head_precision", "stale_weights"])
def test_the_fault_of_a_sampler_is_named_from_the_trainers_scores(one_rank: dict[str, Any], fault: str) -> None:
    found = one_rank["planted_faults"]
    assert found[fault]["fault"] == fault
    assert found[fault]["mean"] > 1e-3


def test_a_sampler_without_fault_agrees_and_probing_changes_no_weight(one_rank: dict[str, Any]) -> None:
    found = one_rank["planted_faults"]
    assert found["none"]["fault"] is None
    assert found["none"]["mean"] < 1e-5
    assert found["kept"] == 0.0


@pytest.mark.parametrize("name", ["new_rate", "overridden_rate"])
def test_a_resume_with_another_rate_goes_on_with_it_from_the_place_of_the_schedule(
    one_rank: dict[str, Any], name: str
) -> None:
    steps_more, rate, _ = json.loads(one_rank["refusals"][name])
    assert (steps_more, rate) == (0, 7e-3)


def test_a_resume_with_another_weight_decay_goes_on_with_it(one_rank: dict[str, Any]) -> None:
    steps_more, _, decay = json.loads(one_rank["refusals"]["new_decay"])
    assert (steps_more, decay) == (0, 0.5)


def test_a_resume_with_the_checkpoints_schedule_goes_on_with_its_rates(one_rank: dict[str, Any]) -> None:
    steps_more, rate, decay = json.loads(one_rank["refusals"]["saved_rates"])
    assert (steps_more, rate, decay) == (0, *json.loads(one_rank["refusals"]["rates"]))


@pytest.mark.parametrize("variant", ["per_rollout", "per_token", "distributed"])
def test_two_data_parallel_ranks_train_like_one(two_ranks: dict[str, Any], variant: str) -> None:
    found = two_ranks["data_parallel"][variant]
    assert found["moved"] > 1e-3
    assert found["weights"] < 2e-6
    assert found["metrics"] < 1e-5


@pytest.mark.parametrize("objective", ["whitened", "sequence_ratio", "own_weighting"])
def test_every_objective_trains_alike_on_two_ranks_and_on_one(two_ranks: dict[str, Any], objective: str) -> None:
    found = two_ranks["objectives"][objective]
    assert found["moved"] > 1e-3
    assert found["weights"] < 1e-5
    assert found["metrics"] < 1e-5


@pytest.mark.parametrize(
    ("objective", "passes", "narrow_passes"), [("own_weighting", 0, 0), ("sequence_ratio", 1, 0), ("whitened", 0, 2)]
)
def test_preparing_reads_lazy_steps_as_often_as_the_objective_needs_and_keeps_none(
    two_ranks: dict[str, Any], objective: str, passes: int, narrow_passes: int
) -> None:
    found = two_ranks["objectives"][objective]["reads"]
    microbatches = 6
    assert found["prepare"] == passes * microbatches
    assert found["prepare_narrow"] == narrow_passes * microbatches
    assert found["train"] == microbatches
    assert found["most_held"] <= 2


def test_the_old_policy_is_that_before_the_first_step_of_the_batch(two_ranks: dict[str, Any]) -> None:
    first, second, third = two_ranks["objectives"]["sequence_ratio"]["reported"]
    assert abs(first["ppo_kl"]) < 1e-6
    assert first["ois"] == pytest.approx(6 / 7, abs=1e-6), "ratio one, and one of the seven rollouts is wholly masked"
    assert min(abs(second["ppo_kl"]), abs(third["ppo_kl"])) > 1e-4


def test_metrics_of_the_objective_and_of_the_users_weighting_are_reported(two_ranks: dict[str, Any]) -> None:
    found = {name: steps["reported"][0] for name, steps in two_ranks["objectives"].items()}
    assert {"tis", "tis_clipfrac", "tis_abs"} <= found["whitened"].keys()
    assert found["sequence_ratio"].keys() >= {"opsm_clipfrac"}
    assert 0.0 < found["own_weighting"]["position_weight"] < 1.0


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_one_rank_continues_what_two_ranks_saved(two_ranks: dict[str, Any], optimizer: str) -> None:
    found = two_ranks["resume_on_fewer_ranks"][optimizer]
    assert found["weights"] < 2e-6
    assert found["metrics"] < 1e-5


def test_ranks_with_different_microbatch_counts_are_refused(two_ranks: dict[str, Any]) -> None:
    said = two_ranks["unequal_microbatches"]["said"]
    assert said.startswith("TrainerError")
    assert "rank 0: 2, rank 1: 1" in said


def test_every_rank_names_the_rank_and_samples_of_a_bad_loss(two_ranks: dict[str, Any]) -> None:
    said = two_ranks["bad_sample_on_other_rank"]["said"]
    assert said.startswith("TrainerError")
    assert "(rank 1: samples 106, 107)" in said


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "sequence", "recompute", "pipeline"])
def test_model_split_over_two_ranks_trains_like_one(split_model: dict[str, Any], layout: str) -> None:
    found = split_model[layout]
    assert found["moved"] > 1e-3
    assert found["weights"] < 1e-6
    assert found["metrics"] < 3e-5
