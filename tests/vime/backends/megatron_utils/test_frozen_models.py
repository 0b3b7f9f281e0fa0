"""Reference model and teacher through the trainer: exact scores, an untouched actor, updates that survive."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(
        1,
        [
            "steps_match_dense_reference",
            "passes_leave_the_actor_alone",
            "expert_bias_is_exchanged",
            "reference_follows_over_a_resume",
            "sources_of_frozen_weights",
            "wider_passes",
            "what_each_pass_replays",
            "records_match_dense_reference",
        ],
        "frozen_worker.py",
    )


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, ["layouts"], "frozen_worker.py", 500)["layouts"]


@pytest.mark.parametrize(
    ("case", "reported"),
    [
        ("kl_in_loss", ["kl_loss"]),
        ("kl_in_reward", ["reward_kl"]),
        ("distilled", ["opd_reverse_kl"]),
        ("all", ["reward_kl", "opd_reverse_kl"]),
    ],
)
def test_a_step_with_frozen_models_equals_the_dense_float64_reference(
    one_rank: dict[str, Any], case: str, reported: list[str]
) -> None:
    found = one_rank["steps_match_dense_reference"][case]
    assert found["largest_gradient"] > 1e-3
    assert found["gradients"] < 1e-5 * found["largest_gradient"] + 1e-6
    assert found["metrics"] < 2e-5
    assert min(abs(found[name]) for name in reported) > 1e-2, "the frozen models must differ from the actor"


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_distributed"])
def test_passes_leave_weights_and_random_state_bit_by_bit(one_rank: dict[str, Any], kind: str) -> None:
    found = one_rank["passes_leave_the_actor_alone"][kind]
    assert found["apart"] > 0.1, "each pass has weights of its own"
    assert found["weights"] == 0.0
    assert found["random_state"]


def test_the_reference_is_scored_without_candidates_and_the_teacher_with_them(one_rank: dict[str, Any]) -> None:
    num_microbatches = 4
    whole, narrow = one_rank["passes_leave_the_actor_alone"]["fp32"]["reads"]
    assert whole == 2 * num_microbatches, "the teacher, and the actor before the step"
    assert narrow == 3 * num_microbatches, "the reference, advantages and masks"


def test_buffers_that_the_forward_pass_reads_are_exchanged_too(one_rank: dict[str, Any]) -> None:
    found = one_rank["expert_bias_is_exchanged"]
    assert set(found["inside"]) == {0.25}
    assert set(found["after"]) == {0.5}


def test_a_resumed_run_has_the_reference_that_it_would_have_had(one_rank: dict[str, Any]) -> None:
    found = one_rank["reference_follows_over_a_resume"]
    assert found["resumed"] == [0.0, 0.0]
    assert found["saved"] == [False, True, True, True, True], "what --ref-load gives again is not saved"


def test_the_kl_falls_to_nothing_when_the_actor_becomes_the_reference(one_rank: dict[str, Any]) -> None:
    found = one_rank["reference_follows_over_a_resume"]
    assert found["kl"][:2] == found["still"][:2]
    assert found["kl"][2] == found["kl"][4] == pytest.approx(0.0, abs=1e-6)
    assert found["kl"][3] > 1e-6
    assert min(found["still"]) > 1e-2


def test_an_actor_starts_at_its_reference_whatever_the_format(one_rank: dict[str, Any]) -> None:
    found = one_rank["sources_of_frozen_weights"]
    assert found["starts"] == {"hugging_face": 0.0, "newest": 0.0, "numbered": 0.0}
    assert found["scored"] == {"hugging_face": 0.0, "newest": 0.0, "numbered": 0.0}


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("step_of_hf", ["SettingsError", "--ref-load", "is a Hugging Face folder, and iteration 7", "no iteration"]),
        ("absent", ["RestoreError", "iter_0000008 doesn't exist, found: iter_0000007"]),
        ("other_shape", ["ModelError", "unexpected weights", "model.layers.3."]),
    ],
)
def test_weights_that_are_not_there_or_don_t_fit_are_refused(
    one_rank: dict[str, Any], case: str, parts: list[str]
) -> None:
    said = one_rank["sources_of_frozen_weights"]["said"][case]
    assert [part for part in parts if part not in said] == [], said


def test_neighbours_go_through_a_pass_together_and_come_out_as_each_alone(one_rank: dict[str, Any]) -> None:
    found = one_rank["wider_passes"]
    alone, together = found["sizes"][:3], found["sizes"][3:]
    assert alone == [[14, 26, 30, 27]] * 3
    assert together == [[14 + 26 + 30, 27]] * 3
    assert max(together[0]) <= 90
    assert found["scores"] < 1e-5


@pytest.mark.parametrize(
    ("field", "nucleus", "routes"),
    [("reference_log_probs", False, False), ("teacher_log_probs", True, False), ("old_log_probs", True, True)],
)
def test_the_reference_replays_nothing_the_teacher_the_nucleus_and_the_actor_experts_too(
    one_rank: dict[str, Any], field: str, nucleus: bool, routes: bool
) -> None:
    found = one_rank["what_each_pass_replays"]
    equal = {name for name, distance in found.items() if name.startswith(field) and distance < 1e-5}
    assert equal == {f"{field} nucleus={nucleus} routes={routes}"}


def test_entropies_before_the_first_step_are_those_that_it_reports(one_rank: dict[str, Any]) -> None:
    found = one_rank["wider_passes"]
    assert found["entropy"] > 1.0
    assert max(found["entropies"]) < 1e-5


@pytest.mark.parametrize("aggregation", ["per_rollout", "per_token"])
def test_a_step_on_records_equals_the_dense_float64_reference(one_rank: dict[str, Any], aggregation: str) -> None:
    found = one_rank["records_match_dense_reference"][aggregation]
    assert found["largest_gradient"] > 1e-3
    assert found["gradients"] < 1e-6
    assert found["metrics"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["tensor", "sequence", "pipeline", "tied_pipeline", "virtual", "context", "experts", "distributed"]
)
def test_every_layout_scores_like_one_rank(two_ranks: dict[str, Any], layout: str) -> None:
    found = two_ranks[layout]
    assert found["followed"] > 1e-3
    assert found["scores"] < 1e-5
    assert found["saved"] < 1e-5
    assert found["actor"] == 0.0
    assert found["metrics"] < 1e-4
