"""Memory and time of the blockwise output head, beside the dense one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from vime.algorithms.importance import WeightKind, WeightRule
from vime.backends.megatron_utils.head.types import HeadOptions, TopKCandidates
from vime.backends.megatron_utils.logprob import response_log_probs

DESCRIPTION = """\
Measures forward and backward pass of the output head from hidden states to log-probabilities, gradients of hidden
states and weights included: vime's head, which also computes score-centering terms on 128 candidates of each token,
and a dense one, which computes log-probabilities alone through the full float32 logits. Vocabulary 151936, hidden
size 1024; 2048 tokens in float32 on the CPU, 8192 tokens in bfloat16 with float32 products on a GPU.

  memory_over_dense               peak memory that vime's head needs beside its inputs and the gradient of the weights,
                                  divided by that of the dense head
  time_over_dense_logprob         time of vime's head divided by that of the dense one
  memory_with_entropy_over_dense  the same with entropies and their gradient
  time_with_entropy_over_dense    the same with entropies and their gradient
  head_s, head_with_entropy_s, dense_s                       seconds: of processor time on the CPU, where one thread
                                                             works, else of wall time
  head_peak_mib, head_with_entropy_peak_mib, dense_peak_mib  that memory in MiB

On the CPU memory is that of the process as Linux counts it; on a GPU that of torch's allocator.
With --quick the vocabulary is 16384, the hidden size 64, there are 256 tokens, and blocks are smaller.
"""
TEMPERATURE = 0.9
RULE = WeightRule(WeightKind.TIS, 0.0, 2.0)


@dataclass(frozen=True)
class Problem:
    """One microbatch in front of the output head."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    candidates: TopKCandidates
    gradients: torch.Tensor
    """[R] of the log-probabilities; other terms get the same."""
    options: HeadOptions

    @property
    def bytes_of_weight_gradient(self) -> int:
        return self.weight.nbytes


def make_problem(num_tokens: int, vocab_size: int, hidden_size: int, num_candidates: int, device: str) -> Problem:
    """The same numbers at every call."""
    chance = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance, device=device)

    starts = torch.randint(vocab_size, (num_tokens, 1), generator=chance, device=device)
    ids = (starts + torch.arange(num_candidates, device=device) * 97) % vocab_size
    return Problem(
        hidden=normal(num_tokens, hidden_size).to(dtype).requires_grad_(),
        weight=(normal(vocab_size, hidden_size) * 2 / hidden_size**0.5).to(dtype).requires_grad_(),
        targets=torch.randint(vocab_size, (num_tokens,), generator=chance, device=device),
        candidates=TopKCandidates(ids.int(), normal(num_tokens, num_candidates).log_softmax(-1) - 0.1),
        gradients=normal(num_tokens),
        options=HeadOptions(vocab_size, TEMPERATURE),
    )


def run_dense(problem: Problem) -> None:
    logits = problem.hidden.float() @ problem.weight.float().t() / TEMPERATURE
    log_probs = logits.log_softmax(-1).gather(1, problem.targets[:, None])[:, 0]
    log_probs.backward(problem.gradients)


def run_head(problem: Problem, *, with_entropy: bool) -> None:
    terms = response_log_probs(
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.options,
        with_entropy=with_entropy,
        candidates=problem.candidates,
        rule=RULE,
    )
    values = [value for value in (terms.log_prob, terms.sc_correction, terms.entropy) if value is not None]
    torch.autograd.backward(values, [problem.gradients] * len(values))


def measure(problem: Problem, run: Callable[[Problem], None]) -> tuple[float, float]:
    """Seconds, and bytes of peak memory beside the inputs and the gradient of the weights."""
    problem.hidden.grad = problem.weight.grad = None
    device = problem.hidden.device
    before = _reset_peak(device)
    started = _clock(device)
    run(problem)
    seconds = _clock(device) - started
    return seconds, max(_peak(device) - before - problem.bytes_of_weight_gradient, 1)


def _clock(device: torch.device) -> float:
    """Seconds: of the processor in this process, so that others on the machine count little; of the wall on a GPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _reset_peak(device: torch.device) -> int:
    """Bytes in use now; the peak is counted from here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5): the peak becomes the present size
    return _process_bytes("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _process_bytes("VmHWM")


def _process_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


RUNS: Mapping[str, Callable[[Problem], None]] = {
    "dense": run_dense,
    "head": lambda problem: run_head(problem, with_entropy=False),
    "head_with_entropy": lambda problem: run_head(problem, with_entropy=True),
}


def repeat(problem: Problem) -> dict[str, float]:
    """Every value, from one run of each head."""
    found = {name: measure(problem, run) for name, run in RUNS.items()}
    seconds = {name: time_ for name, (time_, _) in found.items()}
    peaks = {name: peak for name, (_, peak) in found.items()}
    return {
        "memory_over_dense": peaks["head"] / peaks["dense"],
        "time_over_dense_logprob": seconds["head"] / seconds["dense"],
        "memory_with_entropy_over_dense": peaks["head_with_entropy"] / peaks["dense"],
        "time_with_entropy_over_dense": seconds["head_with_entropy"] / seconds["dense"],
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"{name}_peak_mib": value / 2**20 for name, value in peaks.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("logprob_memory", DESCRIPTION, repeats=5)
    options = parse_options(parser, argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    if options.quick:
        problem = make_problem(256, 16384, 64, 128, device)
        problem = replace(problem, options=replace(problem.options, chunk_rows=64, tile_columns=1024))
    else:
        problem = make_problem(8192 if device == "cuda" else 2048, 151_936, 1024, 128, device)
    for run in RUNS.values():  # threads and workspaces start with the first call
        run(make_problem(64, 4096, 64, 16, device))
    values: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, number in repeat(problem).items():
            values.setdefault(name, []).append(number)
    report = build_report("logprob_memory", values, argv=argv, packages=["torch"])
    report["machine"]["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
