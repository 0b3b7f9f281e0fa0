"""What bounds a measurement, in words with its numbers, for the pages of `generate_performance_doc.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, float]
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def _queue_ops(values: Values, machine: Mapping[str, Any], best: Values) -> str:
    num_cores = machine["num_cores"]
    cpu_ms = {mode: values[f"cpu_ms_per_item_vime_{mode}"] for mode in ("gc_off", "gc_on")}
    most = num_cores * 1000 / min(cpu_ms.values())
    return f"""\
Processor time for an item, of all processes together: {cpu_ms["gc_off"]:.2f} ms, {cpu_ms["gc_on"]:.2f} ms with storage
reclaimed; three synced appends: {values["cpu_ms_per_item_raw"]:.2f} ms. So {num_cores} idle cores do {most:.0f} items/s
at most, however few the syncs. The appends, which mostly wait for the disk, did {best["items_per_s_raw"]:.0f}/s in
their best repeat: against that the cores allow {most / best["items_per_s_raw"]:.2f}. Other programs on the cores slow
the queue more than the appends."""


def _chaos(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
The campaign went on while the code did, over several states of one day's code. Of its sessions after the first ones,
one in twenty starts all of its own; the others fork their drivers and workers from a process that has the libraries
imported, and join a Ray cluster that stands, so that a kill of the whole tree leaves that cluster's own processes. With
vLLM itself they keep the engines of the session before, as --rollout-session-id does."""


def _correct(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return f"""\
What is left at its best, {values["parity_mean"]:.4f}, is what bf16 itself makes: one rank in bf16 is
{values["bf16_mean"]:.4f} from the same rank in float32. Log-probabilities before the temperature differ always. What
older keys and values add depends on how far the weights have moved: the one step between the two publications has a
learning rate of 1e-4, a hundred times that of `gpu.stream`, so that they show. An engine that misses such a step
adds {values["stale_adds"]:.2f}; a request that lives through it keeps {values["kept_adds"] / values["stale_adds"]:.0%}
of that for its later tokens, a cache without a salt {values["unsalted_adds"] / values["stale_adds"]:.0%}, a salted one
nothing. Replayed routes make the largest difference of the mixture of experts {values["moe_max_cut"]:.1f} times smaller
and its k3 distance {values["moe_k3_cut"]:.1f} times. The stages ran side by side, as `--only` lets them, on one of two
GPUs each, beside `gpu.layouts` and parts of a node."""


def _smokes(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
The jobs ran at the same time on one GPU, and beside the engines of `gpu.correct`: they show that each kind of job ends,
reports finite numbers and loses nothing; their seconds say nothing about speed."""


def _learner(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    step_s = values["step_s_32k"]
    shares = {kind: values[f"{kind}_s_32k"] / step_s for kind in ("products", "attention", "copies", "rest")}
    return f"""\
Of a step of 32k tokens {shares["products"]:.0%} are products of matrices, {shares["attention"]:.0%} attention (torch's
second flash attention), {shares["copies"]:.0%} copies and {shares["rest"]:.0%} all other kernels: norms, rotary
embedding, gates and the statistics of the head, each one pass over its tensors, and the optimizer. The GPU is busy for
{values["busy_32k"]:.0%} of it, but for {values["busy_8k"]:.0%} with 8k tokens, whose kernels end before the processor
has started the next ones; graphs of them would help next. Other programs used the processor meanwhile.
[What was tried](design/2026-11-30-gpu-speed.md) has a note of its own."""


def _publication(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    ms = {name: value * 1000 for name, value in values.items()}
    halt_calls = ms["halt_open_s"] + ms["halt_close_s"] + ms["halt_resume_s"]
    return f"""\
The pause is what the engine's core spends in the call that changes its weights, plus the time of the copies on the GPU,
{ms["keep_pause_s"]:.1f} ms together; the yardstick is {ms["plain_s"]:.1f} ms. Whoever makes the call waits
{ms["keep_swap_s"]:.0f} ms for it, since the core answers between two steps. With a halt the same publication costs
{ms["halt_pause_s"]:.0f} ms: {ms["halt_stop_s"]:.0f} for bringing requests to a halt, of which vLLM's server sleeps 20,
{ms["halt_load_s"]:.0f} for loading, by the same copies, and {halt_calls:.0f} for the calls that open, close and resume.
In the {values["keep_prepare_s"]:.2f} s before, the version is gathered, brought beside the model and verified; sampling
goes on, and shares process and GPU with that. [What was tried](design/2026-11-30-swaps.md) has a note of its own.
{_publication_shared() if "ipc_pause_s" not in values else _publication_on_two(values, ms)}"""


def _publication_on_two(values: Values, ms: Values) -> str:
    return f"""
With trainer and engine on one of the two GPUs the pause is {ms["ipc_pause_s"]:.1f} ms; weights that are sent in the
pause, as large ones are, make it {ms["streamed_pause_s"]:.0f} ms. Another engine worked on the trainer's GPU meanwhile
(`gpu.sample_path`), but not during the broadcast and not during `ipc`.

Seconds lost in ten differ by more from one window to the next than keep, halt and ipc can cost. Without a publication
the engine makes about {values["wait_lost_tokens"] / ms["wait_lost_s"]:.0f} thousand tokens/s where all requests began
at once, as after wait and abort, but {values["halt_lost_tokens"] / ms["halt_lost_s"]:.0f} thousand where they begin one
by one, as in keep and halt: steps with a prompt among them are slow, for which these engines captured no graphs
(`FULL_DECODE_ONLY`). With graphs for all steps (`FULL`) an engine makes as much of both, which is not the suite's
choice yet: [graphs of an engine](design/2026-11-30-gpu-speed.md)."""


def _publication_shared() -> str:
    before = _values("gpu_shared/gpu.publication.disk")["keep_pause_s"] * 1000
    return f"""
The yardstick here is one copy inside the GPU; there are as many copies as the model has places. Over a plain broadcast
between two GPUs the pause is below 1 (`ipc_pause_over_plain` of the table for two GPUs). It was {before:.0f} ms when
the engine was halted and weights were copied, verified and loaded in the pause."""


def _publication_disk(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return f"""\
From a run before weights were changed between two steps; versions on disk were not measured again. A delta has
{values["delta_over_full"]:.1%} of the bytes, but on a local disk takes longer than a whole version: the engine still
reads and verifies all of it."""


def _sample_path(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    queued = values["queued_tokens_per_s_logprob"] / values["tokens_per_s_logprob"]
    return f"""\
Both goals are met. The rows of a step leave the engine's core as the one array in which they came from the GPU, and the
API server gives each request its own: [what was tried](design/2026-11-30-sample-route.md). That a ratio is above 1 was
not looked into: this machine's processor was slow. On another (44,300 tokens/s with tokens alone) an earlier commit of
the same route made 0.998 with log-probabilities and 0.980 with a head. Engines had graphs of all steps (`FULL`) in both
runs, on both sides of each ratio.

Through producers and queue, every sample checked, scored and stored, {queued:.2f} of the engine's own rate comes out;
there answers are twice as long."""


def _sample_path_routes(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    moe = values["tokens_per_s_routes"] / values["tokens_per_s_moe"]
    return f"""\
From a run before the rows of a step were sent whole; routes were not measured again, since the engine of a mixture of
experts did not start with graphs of all steps. The engines shared the GPU's memory; the quotient of their medians is
{moe:.2f}. Routes through the queue were not measured."""


def _learning(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    stream, turns = (values[f"{side}_s"] / values[f"{side}_steps"] for side in ("async", "sync"))
    return f"""\
Both jobs ran at the same time on one GPU, each with its engine on it, too: a step of the stream takes {stream:.2f} s,
one with both sides in turn {turns:.2f} s. Each job ran once, and how many steps it takes to the goal differs from run
to run. The engine is fast and the trainer small, so samples were at most {values["async_staleness_max"]:.0f} versions
old, of the 4 that are allowed."""


def _queue_load(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    on_disk, in_memory = (values[f"{side}_wait_s"] / values[f"{side}_step_s"] for side in ("straw", "memory"))
    return f"""\
Trainer and engine share the GPU, so the trainer waits for samples for {on_disk:.0%} of a step with the queue on disk
and {in_memory:.0%} with samples in memory. Each job ran once: what their ratio is off from 1 by is mostly how two such
jobs differ, so it says no more than that the queue on disk doesn't hold them up."""


def _crash(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return f"""\
A trainer that is killed starts again inside the job in {values["trainer_s"]:.0f} s, an engine in
{values["engine_s"]:.0f} s: it is vLLM's start, and the restarted engine opens a buffer of shared memory that is new."""


def _layouts(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
The models are tiny and their logits far apart. In bf16 the order of sums differs between layouts, and a token near the
border of two experts can take the other one, so the floor finds gross faults only; in float32 tests hold the weights
after such steps to one rank's within 1e-5 (`tests/vime/backends/megatron_utils/test_layouts.py`). Which tokens differ
most was not looked at. Replayed routes are held against own ones on a rank in bf16 of their own."""


def _node_layouts(values: Values, machine: Mapping[str, Any], _best: Values) -> str:
    ranks = {int(name[5:].split("_")[0]) for name in values if name.startswith("chain")}
    largest = max(value for name, value in values.items() if name.endswith(("_loss", "_grad_norm")))
    return f"""\
Worlds of {" and ".join(map(str, sorted(ranks)))} ranks were tried ({machine["devices"]}). No loss or gradient norm of a
layout, or of a chain of layouts that resume each other's checkpoints, is more than {largest:.3f} from one rank in fp32;
bf16 alone makes {values["dense_loss"]:.3f}. Other parts of the suite ran on the same GPUs meanwhile."""


def _node_colocation(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
With two GPUs there are two ranks and two engines, two ranks and one engine of two workers, and one rank with a critic.
The three jobs ran at the same time on the same GPUs, beside `gpu.correct` and both parts with layouts, with smaller
microbatches and caches than the part's own: they show that each of them ends and loses nothing; their seconds say
nothing about speed."""


def _stream(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    queued = _values("gpu_shared/gpu.sample_path.routes")["queued_tokens_per_s_logprob"]
    return f"""\
Generation is the slower side: the trainer waits for {values["trainer_idle_share"]:.0%} of the time. **The engine alone
is faster than this table says**, so the ratios to it (`stream_over_slower`, `turns_ceiling`, `ceiling_share`) can't be
relied on: while it was measured, tests, the making of a model and `gpu.learner` used the processor, which an
engine of so small a model waits for. The same requests through producers and queue, without training, made
{queued:,.0f} tokens/s some minutes later on the same machine (the run of `gpu.sample_path.routes`). Of that the stream
trains {values["stream_tokens_per_s"] / queued:.2f}: more than the floor of 0.85, less than the goal of 0.95. With
nothing beside it but an engine on the other GPU, the engine alone made 37,800 on such a machine a day later
([graphs of an engine](design/2026-11-30-gpu-speed.md)). The other balances were not measured: machines of two GPUs
could not be had any more.

What is lost was not profiled. A publication lasts {values["publication_s"]:.2f} s; the trainer waits for
{values["publish_s"] * 1000:.0f} ms of it, and the engine makes no step for {values["pause_s"] * 1000:.1f} ms, but
receives and verifies on its GPU while it samples. Samples come in waves, since all requests began at once and are
equally long."""


def _values(name: str) -> dict[str, float]:
    """Medians of another stored result."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    return {key: value["median"] for key, value in report["values"].items()}


WORDS: Mapping[str, Callable[[Values, Mapping[str, Any], Values], str]] = {
    "cpu/chaos": _chaos,
    "cpu/chaos_real_engine": _chaos,
    "cpu/queue_ops": _queue_ops,
    "gpu/gpu.layouts": _layouts,
    "gpu/gpu.node.colocation": _node_colocation,
    "gpu/gpu.node.layouts": _node_layouts,
    "gpu/gpu.publication": _publication,
    "gpu/gpu.stream": _stream,
    "gpu_shared/gpu.correct": _correct,
    "gpu_shared/gpu.crash": _crash,
    "gpu_shared/gpu.learner": _learner,
    "gpu_shared/gpu.publication": _publication,
    "gpu_shared/gpu.publication.disk": _publication_disk,
    "gpu_shared/gpu.queue_load": _queue_load,
    "gpu_shared/gpu.learning": _learning,
    "gpu_shared/gpu.sample_path": _sample_path,
    "gpu_shared/gpu.sample_path.routes": _sample_path_routes,
    "gpu_shared/gpu.smokes": _smokes,
}
"""Folder and benchmark of a stored result -> words from the medians, the machine and the largest of each value's
repeats. On other devices other words would hold."""
