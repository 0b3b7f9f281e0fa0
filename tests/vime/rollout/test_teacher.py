"""A teacher in an engine scores samples over HTTP."""

from __future__ import annotations

import pytest

from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.errors import EngineError, SettingsError
from vime.rollout.teacher import EngineTeacher
from vime.utils.types import Sample


async def test_each_response_token_gets_the_teachers_log_probability() -> None:
    with StandinEngine() as engine:
        async with EngineClient(engine.address) as client:
            made = await client.generate(GenerateRequest("one", [5, 6], Sampling(4, ignore_eos=True)))
        teacher = EngineTeacher.at(f"{engine.address}/generate")
        try:
            await teacher.check()
            sample = Sample(tokens=[5, 6, *made.token_ids], response_length=4)
            await teacher.score(sample)
            other = Sample(tokens=[5, 6, (made.token_ids[0] + 1) % 50], response_length=1)
            await teacher.score(other)
        finally:
            await teacher.close()
    assert sample.teacher_log_probs == pytest.approx(made.log_probs, abs=1e-6)
    assert other.teacher_log_probs != pytest.approx(made.log_probs[:1], abs=1e-6)


async def test_position_by_position_the_teacher_scores_at_the_temperature() -> None:
    tokens = [5, 6, 7, 8]
    with StandinEngine() as engine:
        teacher, at_one = EngineTeacher.at(engine.address, 0.5), EngineTeacher.at(engine.address)
        try:
            await teacher.check()
            sample, plain = (Sample(tokens=tokens, response_length=3) for _ in range(2))
            await teacher.score(sample)
            await at_one.score(plain)
        finally:
            await teacher.close()
            await at_one.close()
    assert plain.teacher_log_probs is not None
    assert sample.teacher_log_probs == pytest.approx([2 * value for value in plain.teacher_log_probs], abs=1e-6)


async def test_a_server_that_ignores_the_temperature_is_refused_at_the_start() -> None:
    with StandinEngine() as engine:
        engine.has_raw_log_probs = True
        teacher, at_one = EngineTeacher.at(engine.address, 0.5), EngineTeacher.at(engine.address, 1.0)
        try:
            with pytest.raises(
                SettingsError, match=r"scores at temperature 0.5 as at 1, allowed: .*processed_logprobs"
            ):
                await teacher.check()
            await at_one.check()
        finally:
            await teacher.close()
            await at_one.close()


async def test_a_teacher_that_does_not_answer_is_refused_at_the_start() -> None:
    teacher = EngineTeacher.at("http://127.0.0.1:9/generate")
    try:
        with pytest.raises(EngineError, match=r"Engine http://127.0.0.1:9: GET /version failed"):
            await teacher.check()
    finally:
        await teacher.close()


async def test_an_address_needs_host_and_scheme() -> None:
    with pytest.raises(SettingsError, match=r"--rm-url is 'teacher:8000', allowed: http://HOST:PORT"):
        EngineTeacher.at("teacher:8000")
