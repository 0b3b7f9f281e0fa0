"""What a generate function of the user's own asks for, so that its samples can be centered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from vime.errors import SettingsError
from vime.utils.score_centering import score_centering_request


@dataclass(frozen=True)
class Args:
    """The settings that it reads."""

    use_score_centering: bool = True
    score_centering_top_k: int = 128
    rollout_temperature: float = 0.7
    rollout_top_p: float = 1.0


def test_one_more_than_the_candidates_is_asked_for_and_sampling_is_completed() -> None:
    given = {"max_tokens": 5}
    assert score_centering_request(Args(), given) == {
        "max_tokens": 5, "temperature": 0.7, "top_p": 1.0, "logprobs": 129
    }  # fmt: skip
    assert given == {"max_tokens": 5}


def test_with_top_p_only_the_sampled_token_is_listed() -> None:
    assert score_centering_request(replace(Args(), rollout_top_p=0.9), {})["logprobs"] == 1


def test_without_score_centering_nothing_is_added_or_refused() -> None:
    off = replace(Args(), use_score_centering=False)
    assert score_centering_request(off, {"temperature": 9.0}) == {"temperature": 9.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1.0}, r"temperature 1\.0, allowed with --use-score-centering: 0\.7 \(--rollout-temperature\)"),
        ({"top_p": 0.5}, r"top_p 0\.5, allowed with --use-score-centering: 1\.0"),
        ({"top_k": 20}, r"top_k 20, allowed with --use-score-centering: -1"),
    ],
)
def test_sampling_that_the_trainer_does_not_assume_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        score_centering_request(Args(), given)
    assert "Leave" in caught.value.next_step
