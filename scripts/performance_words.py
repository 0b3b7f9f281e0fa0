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
and its k3 distance {values["moe_k3_cut"]:.1f} times. The stages ran side by side on one GPU, as `--only` lets them."""


def _smokes(_values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    return """\
The jobs ran at the same time on one GPU, and beside the engines of `gpu.correct`: they show that each kind of job ends,
reports finite numbers and loses nothing; their seconds say nothing about speed."""


def _learner(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    step_s = values["step_s_32k"]
    shares = {kind: values[f"{kind}_s_32k"] / step_s for kind in ("products", "attention", "copies", "rest")}
    return f"""\
Of a step of 32k tokens {shares["products"]:.0%} are products of matrices, {shares["attention"]:.0%} attention (torch's
second flash attention), {shares["copies"]:.0%} copies and {shares["rest"]:.0%} all other kernels: rotary embedding,
norms, activations, softmax statistics of the head and the optimizer, each a kernel of its own that reads and writes
its tensors whole. So memory bandwidth bounds the step more than arithmetic, and fused kernels for rotary embedding and
norms are what would help next. The GPU is busy for {values["busy_32k"]:.0%} of it, {values["busy_8k"]:.0%} with 8k.
[What was tried](design/2026-11-30-gpu-speed.md) has a note of its own."""


def _publication(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    on_two = "ipc_pause_s" in values
    yardstick = "a plain broadcast to the other GPU" if on_two else "a copy inside the GPU, a sixth of a broadcast"
    halt = {name: values[f"halt_{name}_s"] * 1000 for name in ("stop", "open", "load", "close", "resume")}
    words = f"""\
The yardstick is {yardstick}: {values["plain_s"] * 1000:.1f} ms. The pause is what the engine's core spends in the call
that changes its weights, plus the time of the copies on the GPU, {values["keep_pause_s"] * 1000:.1f} ms together.
Whoever makes the call waits {values["keep_swap_s"] * 1000:.0f} ms for it, since the core answers between two steps.
With a halt the same publication costs {values["halt_pause_s"] * 1000:.0f} ms: {halt["stop"]:.0f} for bringing requests
to a halt, of which vLLM's server sleeps 20, {halt["load"]:.0f} for loading, by the same copies, and
{halt["open"] + halt["close"] + halt["resume"]:.0f} for the calls that open, close and resume. In the
{values["keep_prepare_s"]:.2f} s before, the version is gathered, brought beside the model and verified; sampling goes
on, and shares process and GPU with that. What a publication that keeps requests costs in tokens is less than what two
windows of ten seconds differ by; requests that are waited for lose {values["wait_lost_s"]:.1f} s of sampling, aborted
ones {values["abort_lost_s"]:.1f} s."""
    if on_two:
        words += f"""

With trainer and engine on one of the two GPUs the pause is {values["ipc_pause_s"] * 1000:.1f} ms; weights that are sent
in the pause, as large ones are, make it {values["streamed_pause_s"] * 1000:.0f} ms."""
    return (
        words
        + """

[What was tried](design/2026-11-30-swaps.md) has a note of its own."""
    )


def _sample_path(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    queued = values["queued_tokens_per_s_logprob"] / values["tokens_per_s_logprob"]
    moe = values["tokens_per_s_routes"] / values["tokens_per_s_moe"]
    return f"""\
Through producers and queue, every sample checked, scored and stored, {queued:.2f} of the engine's own rate comes out.
What bounds all rates is one thread of the engine's core, which schedules and launches: profiled apart from this run, it
works for 4.7 of 5.1 ms of a step with tokens alone, the GPU for 3.9. Columns cost what they add to it; how little that
was made, and what was tried, [a note](design/2026-11-30-sample-route.md) says.
The rates of the mixture of experts are those of engines that share the GPU's memory, and vary between repeats: the
quotient of their medians is {moe:.2f}."""


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
most was not looked at; replayed routes against own ones were not measured here."""


def _stream(values: Values, _machine: Mapping[str, Any], _best: Values) -> str:
    alone = 1 / values["generation_tokens_per_s"] + 1 / values["training_tokens_per_s"]
    return f"""\
The trainer was the slower side and was never idle; what it lost against its ceiling is the publication,
{values["publish_s"]:.2f} s of a step in which it waited, nearly all of it the engine's pause. Since this run the
gradients of the output head cost half, and weights are sent before the pause; it was not repeated after that.

Taking turns took {1 / values["turns_tokens_per_s"] / alone:.2f} times as long as both sides alone, one after the other:
nothing else goes on during its publications, and ever fewer requests are left at the end of a batch. So the stream can
gain more over it than `turns_ceiling`, which knows of neither."""


WORDS: Mapping[str, Callable[[Values, Mapping[str, Any], Values], str]] = {
    "cpu/chaos": _chaos,
    "cpu/chaos_real_engine": _chaos,
    "cpu/queue_ops": _queue_ops,
    "gpu/gpu.layouts": _layouts,
    "gpu/gpu.publication": _publication,
    "gpu/gpu.stream": _stream,
    "gpu_shared/gpu.correct": _correct,
    "gpu_shared/gpu.crash": _crash,
    "gpu_shared/gpu.learner": _learner,
    "gpu_shared/gpu.publication": _publication,
    "gpu_shared/gpu.queue_load": _queue_load,
    "gpu_shared/gpu.sample_path": _sample_path,
    "gpu_shared/gpu.smokes": _smokes,
}
"""Folder and benchmark of a stored result -> words from the medians, the machine and the largest of each value's
repeats. On other devices other words would hold."""
