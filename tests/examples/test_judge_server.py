"""What the judge of the `judge` example answers."""

from __future__ import annotations

import random

import pytest
from aiohttp.test_utils import TestClient, TestServer

from examples.judge.server import judge, score

ASKED = {"prompt": "r01234=", "response": "4321x", "label": "43210"}


@pytest.mark.parametrize(
    ("response", "reward"), [("43210", 1.0), ("4321x", 0.8), ("43", 0.4), ("", 0.0), ("432100", 0.0)]
)
def test_the_score_is_the_fraction_of_digits_at_their_place(response: str, reward: float) -> None:
    assert score(response, "43210") == reward


async def test_the_answer_is_a_json_number_and_a_busy_judge_says_503() -> None:
    async with TestClient(TestServer(judge(0.0, random.Random()))) as client:
        answer = await client.post("/judge", json=ASKED)
        assert (answer.status, await answer.json()) == (200, 0.8)
    async with TestClient(TestServer(judge(1.0, random.Random()))) as client:
        assert (await client.post("/judge", json=ASKED)).status == 503
