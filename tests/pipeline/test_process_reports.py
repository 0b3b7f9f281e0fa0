"""Whom a supervisor asks."""

from __future__ import annotations

from typing import Any, cast

from pipeline.process_reports import ProcessReports
from pipeline.sleeping_engine import SleepingEngine
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient


async def nothing() -> None:
    """There is room already."""


async def test_engines_that_sleep_are_not_asked_whether_they_sample() -> None:
    with StandinEngine() as trained, StandinEngine() as judge:
        async with EngineClient(trained.address) as client, SleepingEngine(judge.address, nothing) as sleeping:
            reports = ProcessReports(cast(Any, None), [client], [sleeping], dict)
            for asked, address in (
                (reports.ask_engines(), trained.address), (reports.ask_frozen_engines(), judge.address)
            ):  # fmt: skip
                assert list(asked) == [address]
                await asked[address]
            await sleeping.fall_asleep()
            assert reports.ask_frozen_engines() == {}
