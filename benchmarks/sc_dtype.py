"""What float16 log-probabilities of the sampler's candidates cost score centering, beside float32 ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report

DESCRIPTION = """\
Measures the error that storing the sampler's candidates as float16 or float32 puts into score centering. Heads are
synthetic: the 128 most probable of 151936 tokens, at entropies from certain to flat; the trainer's policy differs from
the sampler's by some training (0.3 a logit) and by noise like that of bf16 kernels (0.01). All terms are computed in
float64 from the stored numbers. A token's gradient is that with respect to its logits; an error is measured in the L1
norm, and compared with the gradient of the sampled token's own term. WEIGHT is the importance weight: none, tis (at
most 2) or icepop (0.5 to 5).

  head_mass_error_max_T          greatest error of a head's probability
  gradient_error_max_T_WEIGHT    greatest error of one token's gradient, on the scale where p - onehot is at most 2
  gradient_error_T_WEIGHT        summed error of all tokens over the summed norms of the sampled terms
  kernel_gradient_error_WEIGHT   gradient_error if the sampler's kernels had rounded differently (0.01 a logit): noise
                                 that is there whatever is stored

T is float16 or float32; each repeat draws new heads.
"""
VOCAB, K = 151936, 128
ROWS, QUICK_ROWS = 128, 16
DRIFT, KERNEL_NOISE = 0.3, 0.01
"""Standard deviations of a logit: by training between sampler and trainer, and between two bf16 kernels."""
TAIL_FLOOR = 1e-6

Array = npt.NDArray[np.float64]


def _weight_none(ratio: Array) -> Array:
    return np.ones_like(ratio)


def _weight_tis(ratio: Array) -> Array:
    return np.clip(ratio, 0.0, 2.0)


def _weight_icepop(ratio: Array) -> Array:
    return np.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)


WEIGHTS: dict[str, Callable[[Array], Array]] = {"none": _weight_none, "tis": _weight_tis, "icepop": _weight_icepop}


def draw_logits(rng: np.random.Generator, rows: int) -> Array:
    """Logits [rows, VOCAB] that fall with the logarithm of a token's rank, as those of language models do; the slope
    differs by row, so that heads hold from about half to all of the probability."""
    slope = rng.uniform(1.1, 6.0, (rows, 1))
    ranks = np.log(np.arange(1, VOCAB + 1))
    return -slope * ranks + rng.normal(0.0, 0.7, (rows, VOCAB))


def log_softmax(logits: Array) -> Array:
    """[rows, VOCAB]"""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def residuals(log_q: Array, log_p: Array, weight: Callable[[Array], Array]) -> Array:
    """Coefficients [rows, K] of the candidates' scores: q f(p / q) - alpha p, where alpha stands for the tail."""
    q, p = np.exp(log_q), np.exp(log_p)
    tail_q = np.maximum(1.0 - q.sum(axis=1, keepdims=True), TAIL_FLOOR)
    tail_p = np.maximum(1.0 - p.sum(axis=1, keepdims=True), TAIL_FLOOR)
    rho = tail_q / tail_p
    return q * weight(p / q) - rho * weight(1.0 / rho) * p


def gradient(coefficients: Array, log_p: Array) -> Array:
    """Gradient [rows, K + 1] of sum c_v log p_v with respect to the candidates' logits, and, last, minus the sum of
    those of all other tokens (which have one sign)."""
    p = np.exp(log_p)
    total = coefficients.sum(axis=1, keepdims=True)
    return np.hstack([coefficients - total * p, total * (1.0 - p.sum(axis=1, keepdims=True))])


def measure(rng: np.random.Generator, rows: int) -> dict[str, float]:
    """One draw of heads; every value of the report."""
    logits = draw_logits(rng, rows)
    sampler = log_softmax(logits)
    trainer = log_softmax(logits + rng.normal(0.0, DRIFT + KERNEL_NOISE, logits.shape))
    again = log_softmax(logits + rng.normal(0.0, KERNEL_NOISE, logits.shape))
    head = np.argpartition(-sampler, K, axis=1)[:, :K]
    sampled = (sampler + rng.gumbel(size=sampler.shape)).argmax(axis=1)[:, None]
    log_q, log_p, log_again = (np.take_along_axis(full, head, axis=1) for full in (sampler, trainer, again))
    log_q_a, log_p_a = (np.take_along_axis(full, sampled, axis=1) for full in (sampler, trainer))
    stored = {name: log_q.astype(name).astype(np.float64) for name in ("float16", "float32")}
    values = {
        f"head_mass_error_max_{name}": float(np.abs(np.exp(given).sum(axis=1) - np.exp(log_q).sum(axis=1)).max())
        for name, given in stored.items()
    }
    for word, weight in WEIGHTS.items():
        exact = residuals(log_q, log_p, weight)
        own = (2.0 * weight(np.exp(log_p_a - log_q_a)) * (1.0 - np.exp(log_p_a))).sum()
        for name, given in stored.items():
            error = gradient(residuals(given, log_p, weight) - exact, log_p)
            norms = np.abs(error).sum(axis=1)
            values[f"gradient_error_max_{name}_{word}"] = float(norms.max())
            values[f"gradient_error_{name}_{word}"] = float(norms.sum() / own)
        error = gradient(residuals(log_again, log_p, weight) - exact, log_p)
        values[f"kernel_gradient_error_{word}"] = float(np.abs(error).sum() / own)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("sc_dtype", DESCRIPTION, repeats=5)
    options = parse_options(parser, argv)
    values: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        rng = np.random.default_rng(repeat)
        for name, number in measure(rng, QUICK_ROWS if options.quick else ROWS).items():
            values.setdefault(name, []).append(number)
    print_report(build_report("sc_dtype", values, argv=argv, packages=["numpy"]), only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
