"""What bounds a measurement, in words with its numbers, for the pages of `generate_performance_doc.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, float]


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


def _learner(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    step_s = values["step_s_32k"]
    shares = {kind: values[f"{kind}_s_32k"] / step_s for kind in ("products", "attention", "copies", "rest")}
    return f"""\
Of a step of 32k tokens {shares["products"]:.0%} are products of matrices, {shares["attention"]:.0%} attention (torch's
second flash attention), {shares["copies"]:.0%} copies and {shares["rest"]:.0%} all other kernels: rotary embedding,
norms, activations, softmax statistics of the head and the optimizer, each a kernel of its own that reads and writes
its tensors whole. So memory bandwidth bounds the step more than arithmetic, and fused kernels for rotary embedding and
norms are what would help next. The GPU is busy for {values["busy_32k"]:.0%} of it, {values["busy_8k"]:.0%} with 8k.

Tried on this GPU: the gradients of the output head as products of two bf16 parts each, in place of float32, took the
head with entropies (8k tokens, vocabulary 151,936) from 181 to 96 ms, with a difference of 2e-4 of the gradients;
experts multiplied together instead of one after the other took the step of the mixture of experts from 390 to
{values["moe_step_s"] * 1000:.0f} ms, with replayed routes from 324 to {values["moe_replay_step_s"] * 1000:.0f} ms."""


def _publication(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    parts = {name: values[f"keep_{name}_s"] * 1000 for name in ("stop", "open", "load", "close", "resume")}
    rest = values["keep_pause_s"] * 1000 - sum(parts.values())
    return f"""\
The yardstick is a copy inside the GPU, {values["plain_s"] * 1000:.1f} ms, which no pause of an engine with requests
under way comes near: bringing them to a halt alone takes {parts["stop"]:.0f} ms. Loading takes {parts["load"]:.0f} ms
(a copy, digests of 310 tensors, and vLLM's own loading, tensor by tensor), the calls that open, close and resume
{parts["open"] + parts["close"] + parts["resume"]:.0f} ms, and filling the shared buffer in the trainer, with digests,
the remaining {rest:.0f} ms. Requests that are kept lose nothing that can be told from the noise of ten seconds;
those that are waited for lose {values["wait_lost_s"]:.1f} s of sampling, aborted ones {values["abort_lost_s"]:.1f} s.
A second engine, without requests, held memory of the same GPU.

Tried: digests of received weights are computed once, not twice; over NCCL, weights of up to 4 GiB are sent and
verified before the pause, beside the model. On disk a delta has {values["delta_over_full"]:.1%} of the bytes, but on a
local disk takes longer than a whole version: the engine still reads and verifies all of it."""


def _sample_path(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    queued = values["queued_tokens_per_s_logprob"] / values["tokens_per_s_logprob"]
    moe = values["tokens_per_s_routes"] / values["tokens_per_s_moe"]
    return f"""\
Floors are met, the goals of 0.95 and 0.90 are not. Through producers and queue, every sample checked, scored and
stored, {queued:.2f} of the engine's own rate comes out. The rates of the mixture of experts are those of engines that
share the GPU's memory, and vary between repeats: the quotient of their medians is {moe:.2f}. Where the time of the
columns goes was not profiled here; heads and routes through the queue were not measured."""


def _queue_load(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    share = values["straw_wait_s"] / values["straw_step_s"]
    return f"""\
Trainer and engine share the GPU, so the trainer waits {share:.0%} of a step for samples on either side: what the ratio
says is that the queue on disk adds nothing that can be told from the difference of two such jobs."""


def _crash(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return f"""\
A trainer that is killed starts again inside the job in {values["trainer_s"]:.0f} s, an engine in
{values["engine_s"]:.0f} s: it is vLLM's start, and the restarted engine opens a buffer of shared memory that is new.
After the kill of the whole tree the same command needs what a cold start needs."""


def _layouts(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
The models are tiny and their logits far apart, so that a wrong gradient would show; in bf16 the order of sums differs
between layouts, and a token near the border of two experts can take the other one. Which tokens differ most was not
looked at; replayed routes against own ones were not measured here."""


def _stream(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return f"""\
The trainer was the slower side and was never idle; what it lost against its ceiling is the publication,
{values["publish_s"]:.2f} s of a step in which it waited, nearly all of it the engine's pause. Since this run the
gradients of the output head cost half, and weights are sent before the pause; it was not repeated after that."""


WORDS: Mapping[str, Callable[[Values, Mapping[str, Any], Values], str]] = {
    "queue_ops": _queue_ops,
    "gpu.learner": _learner,
    "gpu.publication": _publication,
    "gpu.sample_path": _sample_path,
    "gpu.queue_load": _queue_load,
    "gpu.crash": _crash,
    "gpu.layouts": _layouts,
    "gpu.stream": _stream,
}
"""Benchmark -> words from the medians, the machine and the largest of each value's repeats."""
