"""What vime relies on from an engine: the same tests for the stand-in and for a real vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.tiny_models import VOCAB_SIZE, token_text
from tests.vime.backends.vllm_utils.publications import EngineUnderTest, Publisher, Weights, wait_until_staged
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter
from vime.backends.vllm_utils.packets import Packet
from vime.backends.vllm_utils.protocol import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SampleColumns,
    Sampling,
    VersionSpan,
)
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.updates import (
    CompareHeld,
    FromFolder,
    FromMirror,
    LoadStaged,
    LoadStream,
    RememberHeld,
)
from vime.errors import EngineError, PublicationError

_IDS = itertools.count()
_PROMPT = [5, 6, 7, 8, 9]
ROUNDING = 1e-3 if torch.cuda.is_available() else 1e-4
"""Between a log-probability of decoding and of prefill: on a GPU they come from kernels that sum in another order."""
_LONG = 500


def greedy(num_tokens: int, prompt: list[int] = _PROMPT, salt: str | None = None) -> GenerateRequest:
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(f"request-{next(_IDS)}", prompt, sampling, salt)


async def started(client: EngineClient, request: GenerateRequest) -> asyncio.Task[GenerateResult]:
    """The request as a task that has begun to sample."""
    task = asyncio.create_task(client.generate(request))
    await asyncio.sleep(0.25)
    assert not task.done()
    return task


class DamagingSender(WeightSender):
    """Changes one byte after the digests were computed."""

    def _encode(self, tensors: list[tuple[str, torch.Tensor]], digests: Sequence[str]) -> Packet:
        packet = super()._encode(tensors, digests)
        packet.payload[-20] ^= 1
        return packet


class DroppingSender(WeightSender):
    """Loses the last tensor of each packet after the digests were computed."""

    def _encode(self, tensors: list[tuple[str, torch.Tensor]], digests: Sequence[str]) -> Packet:
        return super()._encode(tensors[:-1], digests[:-1])


class TestGenerate:
    async def test_every_token_has_a_log_prob_and_a_version(self, client: EngineClient) -> None:
        version = await client.weight_version()
        result = await client.generate(GenerateRequest("sampled", _PROMPT, Sampling(7, seed=3, ignore_eos=True)))
        assert len(result.token_ids) == len(result.log_probs) == 7
        assert all(log_prob <= 0.0 for log_prob in result.log_probs)
        assert result.finish_reason == "length"
        assert result.version_spans == [VersionSpan(version, 0, 7)]
        assert result.num_prompt_tokens == len(_PROMPT)

    async def test_a_stop_token_ends_the_output(self, client: EngineClient) -> None:
        tokens = (await client.generate(greedy(5))).token_ids
        sampling = Sampling(5, temperature=0.0, stop_token_ids=(tokens[2],), ignore_eos=True)
        result = await client.generate(GenerateRequest("stopped", _PROMPT, sampling))
        assert result.finish_reason == "stop"
        assert result.token_ids == tokens[: tokens.index(tokens[2]) + 1]

    async def test_a_stop_text_ends_the_output_with_the_token_that_completes_it(self, client: EngineClient) -> None:
        tokens = (await client.generate(greedy(8))).token_ids
        words = [token_text(token) for token in tokens]
        stop = words[2] + words[3]
        sampling = Sampling(8, temperature=0.0, stop=(stop,), ignore_eos=True)
        result = await client.generate(GenerateRequest("stopped by a text", _PROMPT, sampling))
        assert result.finish_reason == "stop"
        whole = next(count for count in range(9) if stop in "".join(words[:count]))
        assert result.token_ids == tokens[:whole]
        assert len(result.log_probs) == whole

    async def test_no_stop_token_is_sampled_before_the_fewest_tokens(self, client: EngineClient) -> None:
        stop = (await client.generate(greedy(1))).token_ids[0]
        sampling = Sampling(6, temperature=0.0, stop_token_ids=(stop,), min_tokens=3, ignore_eos=True)
        result = await client.generate(GenerateRequest("at least three", _PROMPT, sampling))
        assert len(result.token_ids) >= 3
        assert stop not in result.token_ids[:3]

    async def test_a_seed_repeats_an_output_whatever_runs_beside_it(self, client: EngineClient) -> None:
        def seeded(seed: int) -> GenerateRequest:
            return GenerateRequest(f"seeded-{next(_IDS)}", _PROMPT, Sampling(24, seed=seed, ignore_eos=True))

        alone = await client.generate(seeded(2**47 + 5))
        first, _, other = await asyncio.gather(*[client.generate(seeded(s)) for s in (2**47 + 5, 6, 7)])
        assert first.token_ids == alone.token_ids
        assert other.token_ids != alone.token_ids

    async def test_a_token_outside_the_vocabulary_is_refused(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        with pytest.raises(EngineError, match=r"POST /inference/v1/sample answered 400") as error:
            await client.generate(greedy(3, prompt=[engine.vocab_size + 1000]))
        assert engine.address in str(error.value)

    async def test_a_stream_brings_in_pieces_what_an_answer_brings_at_once(self, client: EngineClient) -> None:
        version, whole = await client.weight_version(), await client.generate(greedy(40))
        pieces = [piece async for piece in client.stream(greedy(40))]
        assert len(pieces) > 2
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        log_probs = [value for piece in pieces for value in piece.log_probs]
        np.testing.assert_allclose(log_probs, whole.log_probs, atol=ROUNDING)
        assert {span.version for piece in pieces for span in piece.version_spans} == {version}
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert {piece.num_prompt_tokens for piece in pieces} == {len(_PROMPT)}

    async def test_a_stream_ends_with_a_stop_text_as_an_answer_does(self, client: EngineClient) -> None:
        tokens = (await client.generate(greedy(40))).token_ids
        stops = replace(greedy(40), sampling=replace(greedy(40).sampling, stop=(token_text(tokens[20]),)))
        whole, pieces = await client.generate(stops), [piece async for piece in client.stream(stops)]
        assert whole.finish_reason == pieces[-1].finish_reason == "stop"
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids

    async def test_leaving_a_stream_ends_its_request(self, client: EngineClient) -> None:
        async with contextlib.aclosing(client.stream(greedy(_LONG))) as pieces:
            assert (await anext(pieces)).finish_reason is None
        async with asyncio.timeout(20):
            while (await client.metrics()).num_running:
                await asyncio.sleep(0.01)

    async def test_an_aborted_stream_tells_so_in_its_last_piece(self, client: EngineClient) -> None:
        pieces = client.stream(greedy(_LONG))
        first = await anext(pieces)
        await client.pause("abort")
        *_, last = [first, *[piece async for piece in pieces]]
        assert last.finish_reason == "abort"

    async def test_a_stream_that_is_refused_says_why(self, client: EngineClient, engine: EngineUnderTest) -> None:
        with pytest.raises(EngineError, match=r"POST /inference/v1/sample_stream answered 400"):
            await anext(client.stream(greedy(4, [engine.vocab_size + 1000])))
        with pytest.raises(EngineError, match="a stream has no"):
            await anext(client.stream(replace(greedy(4), columns=SampleColumns(num_candidates=2))))

    async def test_many_requests_at_once_keep_their_answers_apart(self, client: EngineClient) -> None:
        prompts = [[3 + number, 4, 5] for number in range(32)]
        alone = [(await client.generate(greedy(4, prompt))).token_ids for prompt in prompts[:4]]
        together = await asyncio.gather(*[client.generate(greedy(4, prompt)) for prompt in prompts])
        assert [result.token_ids for result in together[:4]] == alone


class TestScore:
    async def test_a_sampled_response_is_scored_as_it_was_sampled(self, client: EngineClient) -> None:
        """At temperature 1, also with another prompt before it than the sampler's requests had."""
        result = await client.generate(greedy(24))
        again = await client.generate(GenerateRequest("warm", _PROMPT, Sampling(24, seed=5, ignore_eos=True)))
        scored = await client.score(_PROMPT + again.token_ids, len(_PROMPT))
        assert scored == pytest.approx(again.log_probs, abs=ROUNDING)
        assert await client.score(_PROMPT + result.token_ids, len(_PROMPT) + 20) == pytest.approx(
            (await client.score(_PROMPT + result.token_ids, len(_PROMPT)))[20:], abs=ROUNDING
        )

    async def test_token_by_token_a_response_is_scored_at_the_temperature_of_its_sampler(
        self, client: EngineClient
    ) -> None:
        result = await client.generate(GenerateRequest("cool", _PROMPT, Sampling(8, temperature=0.5, ignore_eos=True)))
        tokens = _PROMPT + result.token_ids
        by_token = await client.score_each(tokens, len(_PROMPT), temperature=1.0)
        assert by_token == pytest.approx(await client.score(tokens, len(_PROMPT)), abs=ROUNDING)
        assert by_token != pytest.approx(await client.score_each(tokens, len(_PROMPT), temperature=0.5), abs=ROUNDING)

    async def test_requests_for_scores_sample_nothing_that_counts(self, client: EngineClient) -> None:
        before = await client.generate(greedy(4))
        await asyncio.gather(*[client.score([5, 6, 7, number], 1) for number in range(8, 24)])
        assert (await client.generate(greedy(4))).token_ids == before.token_ids


class TestPause:
    async def test_keep_freezes_a_request_which_then_ends_with_the_same_tokens(self, client: EngineClient) -> None:
        undisturbed = await client.generate(greedy(_LONG))
        task = await started(client, greedy(_LONG))
        await client.pause("keep")
        assert await client.is_paused()
        await asyncio.sleep(0.8)
        assert not task.done()
        await client.resume()
        assert (await task).token_ids == undisturbed.token_ids

    async def test_a_request_sent_while_paused_waits(self, client: EngineClient) -> None:
        await client.pause("keep")
        task = asyncio.create_task(client.generate(greedy(3)))
        await asyncio.sleep(0.5)
        assert not task.done()
        await client.resume()
        assert (await task).finish_reason == "length"

    async def test_abort_returns_the_tokens_so_far(self, client: EngineClient) -> None:
        task = await started(client, greedy(_LONG))
        await client.pause("abort")
        result = await task
        assert result.finish_reason == "abort"
        assert 0 < len(result.token_ids) < _LONG
        assert len(result.log_probs) == len(result.token_ids)

    async def test_wait_lets_running_requests_finish(self, client: EngineClient) -> None:
        task = await started(client, greedy(_LONG))
        await client.pause("wait")
        assert (await task).finish_reason == "length"
        assert await client.is_paused()

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    async def test_a_hundred_pauses_under_load_each_return_in_time(self, client: EngineClient, mode: PauseMode) -> None:
        load = [asyncio.create_task(client.generate(greedy(_LONG))) for _ in range(8)]
        slowest_s = 0.0
        for _ in range(100):
            started = time.monotonic()
            await client.pause(mode)
            await client.resume()
            slowest_s = max(slowest_s, time.monotonic() - started)
            if mode == "abort":
                load.append(asyncio.create_task(client.generate(greedy(_LONG))))
        assert slowest_s < 10.0
        await client.abort_all()
        assert {result.finish_reason for result in await asyncio.gather(*load)} <= {"abort", "length"}


class TestAbort:
    async def test_one_request_is_aborted_and_the_other_goes_on(self, client: EngineClient) -> None:
        doomed, spared = greedy(_LONG), greedy(_LONG)
        tasks = [asyncio.create_task(client.generate(request)) for request in (doomed, spared)]
        await asyncio.sleep(0.25)
        await client.abort(doomed.request_id)
        assert (await tasks[0]).finish_reason == "abort"
        assert (await tasks[1]).finish_reason == "length"

    async def test_a_cancelled_call_ends_the_request_in_the_engine(self, client: EngineClient) -> None:
        task = await started(client, greedy(_LONG))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.pause("wait")  # returns only when nothing runs
        assert (await client.metrics()).num_waiting == 0


class TestWeights:
    async def test_a_publication_changes_the_tokens_and_the_old_weights_bring_them_back(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        before = await client.generate(greedy(24, salt="0"))
        version = await publisher.publish(engine.second)
        changed = await client.generate(greedy(24, salt="1"))
        assert before.token_ids == engine.reference(engine.first, _PROMPT, 24)
        assert changed.token_ids == engine.reference(engine.second, _PROMPT, 24)
        await publisher.publish(engine.first)
        after = await client.generate(greedy(24, salt="2"))
        assert await client.weight_version() == version + 1
        assert changed.token_ids != before.token_ids
        assert after.token_ids == before.token_ids
        assert after.log_probs == pytest.approx(before.log_probs, abs=1e-5)

    async def test_a_request_that_outlives_a_publication_tells_which_weights_made_which_token(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        old = await client.generate(greedy(_LONG))
        task = await started(client, greedy(_LONG))
        await client.pause("keep")
        version = await publisher.publish(engine.second)
        await client.resume()
        result = await task
        split = result.version_spans[0].stop
        assert result.version_spans == [VersionSpan(version - 1, 0, split), VersionSpan(version, split, _LONG)]
        assert result.token_ids[:split] == old.token_ids[:split]
        assert result.token_ids[split:] != old.token_ids[split:]

    async def test_a_swap_changes_the_weights_of_a_running_request_without_a_halt(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        assert await client.swaps()
        old = await client.generate(greedy(_LONG))
        version = await client.weight_version() + 1
        await publisher.stage(engine.second, version)
        await wait_until_staged(client, version)
        task = await started(client, greedy(_LONG))
        await client.swap_weights(version)
        assert not await client.is_paused()
        assert await client.swap_time_s() >= 0
        assert await client.weight_version() == version
        result = await task
        split = result.version_spans[0].stop
        assert result.version_spans == [VersionSpan(version - 1, 0, split), VersionSpan(version, split, _LONG)]
        assert result.token_ids[:split] == old.token_ids[:split]
        assert result.token_ids[split:] != old.token_ids[split:]
        fresh = await client.generate(greedy(16, salt="swapped"))
        assert fresh.token_ids == engine.reference(engine.second, _PROMPT, 16)

    async def test_an_engine_whose_swap_fails_makes_no_token_before_it_is_repaired(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        version = await client.weight_version()
        with pytest.raises(EngineError, match=f"Version {version + 1} can't be loaded"):
            await client.swap_weights(version + 1)
        assert await client.is_paused()
        assert await client.weight_version() == version
        await publisher.publish(engine.second)
        await client.resume()
        repaired = await client.generate(greedy(16, salt="repaired"))
        assert repaired.token_ids == engine.reference(engine.second, _PROMPT, 16)

    @pytest.mark.parametrize("sender_type", [DamagingSender, DroppingSender])
    async def test_what_does_not_match_its_digest_is_refused_and_the_old_weights_go_on(
        self, client: EngineClient, engine: EngineUnderTest, sender_type: type[WeightSender]
    ) -> None:
        version = await client.weight_version()
        before = await client.generate(greedy(16, salt="before damage"))
        with sender_type("127.0.0.1", 0, 2, timeout_s=20.0) as sender:
            publisher = Publisher(client, sender)
            await publisher.join()
            with pytest.raises(PublicationError, match=r"Weights were refused by .*digest"):
                await publisher.stage(engine.second, version + 1)
        with pytest.raises(EngineError, match=r"POST /update_weights answered 500.*staging of version .* is failed"):
            await Publisher(client, sender).load(version + 1)
        with pytest.raises(EngineError, match=r"/finish_weight_update"):
            await client.finish_weight_update(version + 1)
        assert await client.weight_version() == version
        assert (await client.generate(greedy(16, salt="after damage"))).token_ids == before.token_ids

    async def test_another_version_than_the_staged_one_is_refused(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        version = await client.weight_version()
        await publisher.stage(engine.second, version + 1)
        await client.start_weight_update()
        with pytest.raises(EngineError, match=f"Version {version + 2} can't be loaded"):
            await client.update_weights(LoadStaged(version + 2))

    async def test_the_engine_samples_on_while_a_version_waits_beside_the_model(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        before = await client.generate(greedy(16, salt="before staging"))
        await publisher.stage(engine.second, await client.weight_version() + 1)
        assert (await client.generate(greedy(16, salt="after staging"))).token_ids == before.token_ids

    async def test_weights_that_are_loaded_as_they_arrive_are_the_same(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        version = await client.weight_version() + 1
        await client.pause("keep")
        await client.start_weight_update()
        send = asyncio.to_thread(publisher.sender.send, engine.second)
        await asyncio.gather(client.update_weights(LoadStream(version)), send)
        await client.finish_weight_update(version)
        await client.resume()
        streamed = await client.generate(greedy(16, salt="streamed"))
        assert streamed.token_ids == engine.reference(engine.second, _PROMPT, 16)

    async def test_a_set_without_a_parameter_is_refused_and_a_whole_one_repairs_the_engine(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        version = await client.weight_version()
        before = await client.generate(greedy(16, salt="whole"))
        incomplete = [item for item in engine.second if not item[0].endswith("layers.1.self_attn.k_proj.weight")]
        with pytest.raises(EngineError, match="don't fill 1 layers of the model"):
            await publisher.transfer(incomplete)
        assert await client.weight_version() == version
        await publisher.publish(engine.first)
        assert (await client.generate(greedy(16, salt="repaired"))).token_ids == before.token_ids

    async def test_a_sender_that_fails_half_way_leaves_the_engine_ready_for_the_next_publication(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        def failing() -> Iterable[tuple[str, torch.Tensor]]:
            yield engine.second[0]
            raise OSError("the trainer's disk is gone")

        with pytest.raises(OSError, match="disk is gone"):
            await publisher.stage(failing(), await client.weight_version() + 1)
        await wait_until_staged(client, await client.weight_version() + 1)
        (status,) = await client.staging()
        assert status.state == "failed"
        assert "sender gave up" in status.reason
        await publisher.publish(engine.second)

    async def test_an_update_that_a_lost_publisher_left_open_is_taken_over(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        await client.start_weight_update()
        version = await publisher.publish(engine.second)
        assert await client.weight_version() == version

    async def test_weights_come_from_a_folder_too(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest, tmp_path: Path
    ) -> None:
        version = await client.weight_version() + 1
        written = VersionWriter(tmp_path).write(version, engine.second)
        request = FromFolder(version, str(tmp_path / f"weight_v{version:06d}"), written.receipt.names, "0" * 32)
        await client.stage_weights(request)
        with pytest.raises(EngineError, match="has digest"):
            await publisher.load(version)
        await client.stage_weights(msgspec.structs.replace(request, digest=written.receipt.digest))
        await publisher.load(version)
        await client.finish_weight_update(version)
        found = await client.generate(greedy(16, salt="disk"))
        assert found.token_ids == engine.reference(engine.second, _PROMPT, 16)

    async def test_weights_come_as_changes_to_the_hosts_copy_too(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest, tmp_path: Path
    ) -> None:
        writer = VersionWriter(tmp_path / "published", delta=DeltaFormat())
        first_version = await client.weight_version() + 1
        for version, weights in enumerate((engine.first, engine.second), start=first_version):
            receipt = writer.write(version, weights).receipt
            source, mirror = str(tmp_path / "published"), str(tmp_path / "local")
            await client.stage_weights(FromMirror(version, source, mirror, receipt.names, receipt.digest))
            await publisher.load(version)
            await client.finish_weight_update(version)
        found = await client.generate(greedy(16, salt="delta"))
        assert found.token_ids == engine.reference(engine.second, _PROMPT, 16)

    async def test_what_an_engine_holds_is_compared_with_what_it_held(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        await publisher.publish(engine.first)
        await client.start_weight_update()
        await client.update_weights(RememberHeld())
        await publisher.publish(engine.first)
        await client.start_weight_update()
        await client.update_weights(CompareHeld())
        await publisher.publish(engine.second)
        await client.start_weight_update()
        with pytest.raises(EngineError, match="tensors differ from those that the engine was started with"):
            await client.update_weights(CompareHeld())

    async def test_an_update_that_never_comes_names_the_engine(
        self, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        with WeightSender("127.0.0.1", 0, 2, engine_names=[engine.address], timeout_s=0.2) as sender:
            with pytest.raises(PublicationError, match="did not join the weight transfer") as error:
                await asyncio.to_thread(sender.connect)
            assert engine.address in str(error.value)
        await publisher.publish(engine.first)


class TestCache:
    async def test_another_salt_never_reuses_cached_tokens(self, client: EngineClient) -> None:
        prompt = [3 + position % 40 for position in range(300)]
        first = await client.generate(greedy(2, prompt, salt="version 1"))
        again = await client.generate(greedy(2, prompt, salt="version 1"))
        other = await client.generate(greedy(2, prompt, salt="version 2"))
        assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0)
        assert again.num_cached_tokens in (256, 288), "whole blocks, of 32 tokens or more on a CPU and of 16 on a GPU"

    @pytest.mark.parametrize("flushes", [False, True])
    async def test_a_prompt_that_comes_again_after_a_publication_is_answered_by_the_new_weights_alone(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest, flushes: bool
    ) -> None:
        """Keys and values of the old weights are reused neither under the new version's salt nor after a reset."""
        prompt = [6 + position % 40 for position in range(300)]
        for _ in range(2):
            old = await client.generate(greedy(8, prompt, salt="version 1"))
        assert old.num_cached_tokens > 0
        await publisher.publish(engine.second)
        if flushes:
            await client.reset_prefix_cache()
        again = await client.generate(greedy(8, prompt, salt="version 1" if flushes else "version 2"))
        assert again.num_cached_tokens == 0
        assert again.token_ids == engine.reference(engine.second, prompt, 8) != old.token_ids
        scored = await client.score(prompt + again.token_ids, len(prompt))
        assert again.log_probs == pytest.approx(scored, abs=ROUNDING), "a scored prompt is computed without the cache"

    async def test_a_reset_forgets_the_cache(self, client: EngineClient) -> None:
        prompt = [4 + position % 40 for position in range(300)]
        await client.generate(greedy(2, prompt))
        await client.reset_prefix_cache()
        assert (await client.generate(greedy(2, prompt))).num_cached_tokens == 0

    async def test_sleep_forgets_the_cache_and_keeps_the_weights(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        assert (await client.capabilities()).sleep
        prompt = [5 + position % 40 for position in range(300)]
        before = await client.generate(greedy(4, prompt))
        await client.pause("abort")
        await client.sleep()
        await client.wake_up(["weights"])
        waiting = asyncio.create_task(client.generate(greedy(4, prompt)))
        assert not (await asyncio.wait([waiting], timeout=0.2))[0], "half awake it samples nothing"
        await client.wake_up(["kv_cache"])
        await client.resume()
        after = await waiting
        assert after.num_cached_tokens == 0
        assert after.token_ids == before.token_ids == engine.reference(engine.first, prompt, 4)

    async def test_before_it_sleeps_it_may_answer_what_it_was_asked_and_what_comes_later_waits(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        asked = asyncio.create_task(client.generate(greedy(200)))
        while not (await client.metrics()).num_running:
            await asyncio.sleep(0.01)
        finishing = asyncio.create_task(client.finish_requests())
        assert len((await asked).token_ids) == 200
        await finishing
        later = asyncio.create_task(client.generate(greedy(4)))
        scored = asyncio.create_task(client.score([*_PROMPT, 7], len(_PROMPT)))
        assert not (await asyncio.wait([later, scored], timeout=0.2))[0]
        await client.sleep("wait")
        await client.wake_up([])
        await client.resume()
        assert (await later).token_ids == engine.reference(engine.first, _PROMPT, 4)
        assert len(await scored) == 1


COLUMNS = SampleColumns(num_candidates=4)


def sampled(num_tokens: int, columns: SampleColumns, **sampling: float) -> GenerateRequest:
    wanted = Sampling(max_tokens=num_tokens, seed=3, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(f"request-{next(_IDS)}", _PROMPT, wanted, columns=columns)


class TestColumns:
    async def test_each_token_has_its_most_probable_candidates_in_order(self, client: EngineClient) -> None:
        result = await client.generate(sampled(70, COLUMNS))
        assert result.candidates is not None
        ids, log_probs = result.candidates.ids, result.candidates.log_probs
        assert (ids.shape, ids.dtype, log_probs.shape, log_probs.dtype) == ((70, 4), "int32", (70, 4), "float32")
        assert (np.diff(log_probs, axis=1) <= 0).all()
        assert all(len(set(row)) == 4 for row in ids.tolist())
        listed = ids == np.asarray(result.token_ids)[:, None]
        own = np.broadcast_to(np.asarray(result.log_probs, np.float32)[:, None], listed.shape)
        assert listed.any()
        np.testing.assert_array_equal(log_probs[listed], own[listed])

    async def test_a_request_that_asks_for_no_columns_gets_none(self, client: EngineClient) -> None:
        result = await client.generate(sampled(3, SampleColumns()))
        assert (result.candidates, result.nucleus, result.routed_experts) == (None, None, None)

    async def test_more_candidates_than_the_engine_returns_are_refused_with_the_limit(
        self, client: EngineClient
    ) -> None:
        limit = (await client.capabilities()).max_candidates
        with pytest.raises(EngineError, match=rf"answered 400.*allowed: {limit}"):
            await client.generate(sampled(3, SampleColumns(num_candidates=limit + 1)))

    async def test_columns_of_requests_in_one_batch_stay_apart(self, client: EngineClient) -> None:
        wanted = [SampleColumns(num_candidates=count) for count in (0, 1, 4, 7)] * 6
        results = await asyncio.gather(
            *[client.generate(sampled(20 + number, columns)) for number, columns in enumerate(wanted)]
        )
        for number, (columns, result) in enumerate(zip(wanted, results, strict=True)):
            width = 0 if result.candidates is None else result.candidates.ids.shape[1]
            assert (len(result.token_ids), len(result.log_probs), width) == (
                20 + number, 20 + number, columns.num_candidates
            )  # fmt: skip

    async def test_what_top_p_left_has_the_sampled_token_and_sums_to_one(self, client: EngineClient) -> None:
        result = await client.generate(sampled(70, SampleColumns(nucleus=True), top_p=0.8))
        nucleus = result.nucleus
        assert nucleus is not None
        assert len(nucleus.offsets) == 71
        for position, (token, log_prob) in enumerate(zip(result.token_ids, result.log_probs, strict=True)):
            rows = slice(nucleus.offsets[position], nucleus.offsets[position + 1])
            kept = dict(zip(nucleus.ids[rows].tolist(), nucleus.log_probs[rows].tolist(), strict=True))
            assert kept[token] == pytest.approx(log_prob)
            assert sum(map(math.exp, kept.values())) == pytest.approx(1.0, abs=1e-4)
        assert nucleus.offsets[-1] > 70

    @pytest.mark.parametrize("how", ["pause", "abort"])
    async def test_an_aborted_request_has_columns_of_every_token_that_it_returns(
        self, client: EngineClient, how: str
    ) -> None:
        request = replace(greedy(_LONG), columns=COLUMNS)
        task = asyncio.create_task(client.generate(request))
        while (await client.metrics()).num_running == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.25)
        await (client.pause("abort") if how == "pause" else client.abort(request.request_id))
        result = await task
        assert result.finish_reason == "abort"
        assert result.candidates is None or len(result.candidates.ids) == len(result.token_ids) == len(result.log_probs)
        assert result.version_spans[-1:] == [] or result.version_spans[-1].stop == len(result.token_ids)

    async def test_columns_go_on_through_a_pause_and_a_publication(
        self, client: EngineClient, publisher: Publisher, engine: EngineUnderTest
    ) -> None:
        task = await started(client, replace(greedy(_LONG), columns=COLUMNS))
        await client.pause("keep")
        version = await publisher.publish(engine.second)
        await client.resume()
        result = await task
        split = result.version_spans[0].stop
        assert result.version_spans == [VersionSpan(version - 1, 0, split), VersionSpan(version, split, _LONG)]
        assert result.candidates is not None
        assert result.candidates.ids.shape == (_LONG, 4)
        np.testing.assert_array_equal(result.candidates.ids[:, 0], result.token_ids)  # greedy

    async def test_a_stop_token_ends_the_columns_too(self, client: EngineClient) -> None:
        tokens = (await client.generate(greedy(5))).token_ids
        sampling = Sampling(5, temperature=0.0, stop_token_ids=(tokens[2],), ignore_eos=True)
        result = await client.generate(GenerateRequest("stopped columns", _PROMPT, sampling, columns=COLUMNS))
        assert result.candidates is not None
        assert len(result.candidates.ids) == len(result.token_ids) == tokens.index(tokens[2]) + 1


class TestQuestions:
    async def test_an_engine_tells_what_it_can_do(self, client: EngineClient) -> None:
        capabilities = await client.capabilities()
        assert capabilities.engine_version.startswith(("0.26.", "0.32"))
        assert capabilities.max_model_len == 2048
        assert capabilities.world_size == 1
        assert capabilities.token_in_generate
        assert capabilities.pause_keep
        assert capabilities.version_spans
        assert capabilities.cache_salt
        assert capabilities.columns
        assert capabilities.max_candidates == VOCAB_SIZE
        assert capabilities.nucleus
        assert capabilities.weight_transfer

    async def test_its_log_has_a_line_for_a_call_of_control_and_none_for_a_sample(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        if engine.log_path is None:
            pytest.skip("the stand-in writes none")
        await client.generate(greedy(2))
        await client.is_paused()
        async with asyncio.timeout(20):
            while "GET /is_paused" not in engine.log_path.read_text():
                await asyncio.sleep(0.05)
        assert "POST /inference/v1/sample" not in engine.log_path.read_text()

    async def test_metrics_count_running_requests(self, client: EngineClient) -> None:
        tasks = [asyncio.create_task(client.generate(greedy(_LONG))) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert (await client.metrics()).num_running == 3
        await client.abort_all()
        await asyncio.gather(*tasks)

    async def test_a_running_engine_is_ready(self, client: EngineClient) -> None:
        assert await client.ready()


def test_the_two_sets_of_weights_differ(engine: EngineUnderTest) -> None:
    def values(weights: Weights) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in weights])

    assert not torch.equal(values(engine.first), values(engine.second))
