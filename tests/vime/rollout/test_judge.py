"""A judge over HTTP: what is asked again, what is not, how many at once, and the reason of each failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from vime.errors import RewardError
from vime.rollout.rewards import Rewards, score
from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.judge import Judge, JudgeSettings
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANSWER = Answer("4", "4", prompt="2 + 2?")


@asynccontextmanager
async def judge(handler: Handler, **changes: Any) -> AsyncIterator[Judge]:
    """A judge whose server answers by `handler`."""
    app = web.Application()
    app.router.add_post("/judge", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    asked = Judge(JudgeSettings(f"http://127.0.0.1:{port}/judge", first_pause_s=0.001, max_attempts=3, **changes))
    try:
        yield asked
    finally:
        await asked.close()
        await runner.cleanup()


def answering(*responses: tuple[int, str]) -> tuple[Handler, list[Any]]:
    """A handler that answers one after the other, the last for ever; and what it was asked."""
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        status, text = responses[min(len(asked), len(responses) - 1)]
        asked.append(await request.json())
        return web.Response(status=status, text=text)

    return handler, asked


async def test_prompt_response_and_label_are_posted_and_the_json_is_the_reward() -> None:
    handler, asked = answering((200, '{"helpful": 0.5}'))
    async with judge(handler) as one:
        assert await one.grade(ANSWER) == {"helpful": 0.5}
    assert asked == [{"prompt": "2 + 2?", "response": "4", "label": "4"}]


@pytest.mark.parametrize("trouble", [(429, "slow down"), (503, "restarting"), (200, "Sure! 0.5"), (200, "")])
async def test_what_may_pass_is_asked_again(trouble: tuple[int, str]) -> None:
    handler, asked = answering(trouble, trouble, (200, "1"))
    async with judge(handler) as one:
        assert await one.grade(ANSWER) == 1
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("response", "reason", "num_asked"),
    [
        ((429, "slow down"), "judge_status_429", 3),
        ((500, "oh"), "judge_status_500", 3),
        ((404, "no such page"), "judge_status_404", 1),
        ((200, "Sure! 0.5"), "judge_bad_json", 3),
    ],
)
async def test_each_failure_of_a_judge_has_its_reason(response: tuple[int, str], reason: str, num_asked: int) -> None:
    handler, asked = answering(response)
    async with judge(handler) as one:
        with pytest.raises(RewardError, match=response[1]) as caught:
            await one.grade(ANSWER)
    assert (caught.value.reason, len(asked)) == (reason, num_asked)


async def test_a_judge_that_never_answers_fails_with_a_reason_of_its_own() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:  # noqa: ARG001
        await asyncio.Event().wait()
        raise AssertionError

    async with judge(silent, request_timeout_s=0.02) as one:
        with pytest.raises(RewardError, match=r"no answer within 0\.02 s") as caught:
            await one.grade(ANSWER)
        assert caught.value.reason == "judge_timeout"
    async with judge(silent, timeout_s=0.05) as one:
        with pytest.raises(RewardError, match=r"gave no reward within 0\.05 s") as caught:
            await one.grade(ANSWER)
        assert caught.value.reason == "reward_timeout"


async def test_a_judge_that_is_not_there_is_unreachable() -> None:
    one = Judge(JudgeSettings("http://127.0.0.1:9/judge", first_pause_s=0.001, max_attempts=2))
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9.*2 attempts") as caught:
        await one.grade(ANSWER)
    assert caught.value.reason == "judge_unreachable"
    await one.close()


async def test_no_more_requests_are_at_the_judge_than_allowed() -> None:
    running = most = 0

    async def counting(request: web.Request) -> web.StreamResponse:  # noqa: ARG001
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return web.Response(text="1")

    async with judge(counting, max_concurrency=3) as one:
        assert await asyncio.gather(*(one.grade(ANSWER) for _ in range(12))) == [1] * 12
    assert most == 3


async def test_a_label_that_is_no_json_is_not_asked_about() -> None:
    one = Judge(JudgeSettings("http://127.0.0.1:9/judge"))
    with pytest.raises(RewardError) as caught:
        await one.grade(Answer("4", b"\xff"))
    assert caught.value.reason == "judge_unsendable"


async def test_remote_rm_asks_the_judge_of_the_settings_through_the_proxy() -> None:
    asked: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((str(request.url), await request.json()))
        return web.Response(text="0.25")

    async with judge(handler) as direct:
        proxy = direct.url.removesuffix("/judge")
        words = ["--rm-type", "remote_rm", "--rm-url", "http://judge.invalid/judge", "--http-proxy", proxy]
        sample = Sample(prompt="2 + 2?", response=r"\boxed{4}", label="4", metadata={"rm_type": "boxed_remote_rm"})
        async with Rewards(parse_settings(words)) as rewards:
            await score(rewards.of_sample, None, sample, timeout_s=0, key=None)
    assert sample.reward == 0.25
    assert asked == [("http://judge.invalid/judge", {"prompt": "2 + 2?", "response": "4", "label": "4"})]
