"""Rows of a step as they travel, and where those of each output are."""

from __future__ import annotations

import numpy as np

from vime.backends.vllm_utils.plugin.step_columns import NO_ROW, RowPlaces, pack_rows

BATCH = ["a", "b", "c"]
PLACES = {name: place for place, name in enumerate(BATCH)}


def first_rows(places: RowPlaces, names: str, *, wanted: str = "abc", starts: list[int] | None = None) -> list[int]:
    found = places.find(list(names), BATCH, PLACES, starts, wanted)
    return np.frombuffer(found.first_rows, np.int32).tolist()


def test_rows_that_the_gpu_packed_are_taken_as_they_lie() -> None:
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    packed = pack_rows(whole[:, :2], whole[:, 2:].view(np.float32))
    assert np.shares_memory(packed, whole)
    np.testing.assert_array_equal(packed, whole)


def test_other_arrays_are_packed_with_the_bits_of_their_log_probabilities() -> None:
    ids, log_probs = np.array([[7, 8], [9, 1]]), np.array([[-0.5, -1.5], [-2.0, -0.25]])
    packed = pack_rows(ids, log_probs)
    np.testing.assert_array_equal(packed[:, :2], ids)
    np.testing.assert_array_equal(packed[:, 2:].copy().view(np.float32), log_probs)


def test_places_follow_the_outputs_and_the_rows_of_each_place() -> None:
    places = RowPlaces()
    assert first_rows(places, "ca") == [2, 0]
    assert first_rows(places, "ca", starts=[0, 4, 6]) == [6, 0]
    assert first_rows(places, "ca", starts=[0, 4, 5]) == [5, 0]
    assert first_rows(places, "cxa") == [2, NO_ROW, 0]


def test_places_that_are_remembered_are_not_those_of_a_batch_that_was_changed_in_place() -> None:
    places, batch = RowPlaces(), ["a", "b"]
    assert places.find(["a"], batch, {"a": 0, "b": 1}, None, "ab").first_rows == np.int32(0).tobytes()
    batch.reverse()
    assert places.find(["a"], batch, {"a": 1, "b": 0}, None, "ab").first_rows == np.int32(1).tobytes()


def test_the_first_output_with_columns_is_that_of_a_request_which_asks() -> None:
    places = RowPlaces()
    assert places.find(["a", "b"], BATCH, PLACES, None, "b").first == 1
    places.forget()
    assert places.find(["a", "b"], BATCH, PLACES, None, "ab").first == 0
    places.forget()
    assert places.find(["a", "b"], BATCH, PLACES, None, "").first is None
