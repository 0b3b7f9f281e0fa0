"""A judge elsewhere: samples go to it over HTTP, a few at a time, and are sent again when it is overloaded."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer

_LONGEST_PAUSE_S = 30.0
_SHOWN = 200
"""Characters of a judge's answer that a message shows."""


@dataclass(frozen=True)
class JudgeSettings:
    """How a judge is asked."""

    url: str
    max_concurrency: int = 64
    """Requests at once; others wait for their turn."""
    max_attempts: int = 10
    request_timeout_s: float = 120.0
    timeout_s: float = 600.0
    """For one sample, repeats and pauses included, from its first request."""
    first_pause_s: float = 1.0
    """Before the second attempt; doubled each time up to 30 s, with up to as much again by chance at most 1 s."""
    proxy: str | None = None


class _Again(Exception):
    """An attempt that may be repeated; what the sample fails with when it was the last."""

    def __init__(self, message: str, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.reason, self.wait_s = message, reason, wait_s


class Judge:
    """Posts `{"prompt", "response", "label"}` and takes the JSON answer, a number or an object, for the reward.

    429, 5xx, time-outs, lost connections and answers that are not JSON are tried again; other statuses are not.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._turns = asyncio.Semaphore(settings.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._settings.url

    async def grade(self, answer: Answer) -> Any:
        """The judge's reward. Raises `RewardError` with the reason of the last attempt."""
        try:
            content = json.dumps({"prompt": answer.prompt, "response": answer.response, "label": answer.label})
        except (TypeError, ValueError) as error:
            raise RewardError(f"prompt and label are no JSON: {error}.", reason="judge_unsendable") from error
        async with self._turns:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._grade(content.encode())
            except TimeoutError as error:
                raise RewardError(
                    f"{self._settings.url} gave no reward within {self._settings.timeout_s:g} s.",
                    next_step="Raise --reward-timeout if the judge needs longer.",
                    reason="reward_timeout",
                ) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _grade(self, content: bytes) -> Any:
        settings, attempt = self._settings, 1
        while True:
            try:
                return await self._ask(content)
            except _Again as again:
                if attempt == settings.max_attempts:
                    raise RewardError(
                        f"{settings.url}: {again.message} ({attempt} attempts).",
                        next_step="Check the judge at --rm-url.",
                        reason=again.reason,
                    ) from again
                pause_s = min(settings.first_pause_s * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
                pause_s += min(1.0, settings.first_pause_s) * random.random()
                await asyncio.sleep(max(pause_s, min(again.wait_s, _LONGEST_PAUSE_S)))
                attempt += 1

    async def _ask(self, content: bytes) -> Any:
        try:
            async with self._opened().post(
                self._settings.url,
                data=content,
                headers={"Content-Type": "application/json"},
                proxy=self._settings.proxy,
            ) as response:
                body = await response.text(errors="replace")
        except TimeoutError as error:
            seconds = self._settings.request_timeout_s
            raise _Again(f"no answer within {seconds:g} s", "judge_timeout") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Again(f"{type(error).__name__}: {error}", "judge_unreachable") from error
        except aiohttp.ClientError as error:
            raise RewardError(f"{self._settings.url}: {error}.", reason="judge_unreachable") from error
        return self._read(response.status, response.headers.get("Retry-After", ""), body)

    def _read(self, status: int, retry_after: str, body: str) -> Any:
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
            raise _Again(f"status {status}: {body[:_SHOWN]!r}", f"judge_status_{status}", wait_s)
        if status != HTTPStatus.OK:
            raise RewardError(
                f"{self._settings.url}: status {status}, allowed: 200. It says {body[:_SHOWN]!r}.",
                next_step="Correct --rm-url or the judge.",
                reason=f"judge_status_{status}",
            )
        try:
            return json.loads(body)
        except ValueError as error:
            raise _Again(f"the answer is not JSON: {body[:_SHOWN]!r}", "judge_bad_json") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
                connector=aiohttp.TCPConnector(limit=0),  # the semaphore is the limit
            )
        return self._session
