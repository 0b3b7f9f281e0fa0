"""Each colouring tells one thing of a token."""

from typing import Any

import pytest

from pipeline.sample_view import TokenView
from vime.view.tokens import COLOURINGS, MASKED, coloured, legend

GAP = "gap to the trainer"


def token(**changes: Any) -> TokenView:
    values: dict[str, Any] = {
        "position": 3, "token_id": 7, "text": "x", "version": 4, "log_prob": -1.0, "trained": True,
        "trainer_log_prob": -1.25, "gap": -0.25, "advantage": 0.5,
    }  # fmt: skip
    return TokenView(**values | changes)


def colour(colouring: str, **changes: Any) -> str:
    return coloured([token(**changes)], colouring)[0].colour


def test_a_gap_is_red_below_the_sampler_blue_above_and_stronger_the_larger_it_is() -> None:
    assert [colour(GAP, gap=gap) for gap in (-0.25, 0.25, 0.5, 9.0)] == [
        "rgba(220,38,38,0.350)", "rgba(37,99,235,0.350)", "rgba(37,99,235,0.700)", "rgba(37,99,235,0.700)",
    ]  # fmt: skip
    assert colour(GAP, gap=None) == MASKED


def test_an_advantage_is_green_or_red_and_grey_where_it_does_not_count() -> None:
    assert colour("advantage", advantage=2.0) == "rgba(5,150,105,0.700)"
    assert colour("advantage", advantage=-1.0) == "rgba(220,38,38,0.400)"
    assert colour("advantage", advantage=None) == colour("advantage", advantage=0.0) == MASKED


def test_what_a_token_says_names_both_log_probabilities_and_their_gap() -> None:
    (shown,) = coloured([token()], GAP)
    assert shown.words == (
        "position 3, id 7, policy version 4, log-probability -1.0000, the trainer's -1.2500, gap -0.2500, trained, "
        "advantage 0.5000"
    )


@pytest.mark.parametrize("colouring", COLOURINGS)
def test_every_colouring_has_a_legend_and_grey_only_where_there_is_grey(colouring: str) -> None:
    plain = legend([token()], colouring)
    assert plain
    assert MASKED not in {entry.colour for entry in plain}
    unknown = token(version=None, log_prob=None, gap=None, advantage=None)
    assert legend([token(), unknown], colouring)[-1].colour == MASKED


def test_the_legend_of_versions_has_the_colours_of_the_tokens() -> None:
    tokens = [token(version=9), token(version=3)]
    colours = {shown.colour for shown in coloured(tokens, "policy version")}
    entries = legend(tokens, "policy version")
    assert [entry.words for entry in entries] == ["version 3", "version 9"]
    assert {entry.colour for entry in entries} == colours
