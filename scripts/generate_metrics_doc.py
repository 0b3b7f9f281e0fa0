"""Write `docs/metrics.md` from the struct that a run writes: `python scripts/generate_metrics_doc.py`. Stdlib only.

Names, types and order come from `StepRecord` in `pipeline/progress.py` and the metric names in the trainer's loss, read
as text, so nothing heavy is imported. A field's own docstring wins over the meaning given here.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "pipeline" / "progress.py"
LOSS = ROOT / "vime" / "backends" / "megatron_utils" / "loss.py"
EVALUATION = ROOT / "pipeline" / "evaluation" / "records.py"
CRITIC = ROOT / "vime" / "backends" / "megatron_utils" / "critic.py"
SAMPLE_METRICS = ROOT / "pipeline" / "sample_metrics.py"
SERIES = ROOT / "pipeline" / "metric_sinks" / "points.py"
FAMILIES = ROOT / "pipeline" / "prometheus" / "families.py"
ROLE_RECORDS = ROOT / "pipeline" / "prometheus" / "records.py"
MESSAGES = ROOT / "pipeline" / "messages.py"
NUMBERS = ("int", "float", "bool", "dict[str, int]", "dict[str, float]")
"""Types of the fields that Prometheus is told."""
TARGET = ROOT / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

<!-- Written by scripts/generate_metrics_doc.py; change that script or the struct, not this file. -->

A run appends one JSON object to `<--save>/metrics.jsonl` for each rollout batch, after it was trained and its weights
were published. The lines of all sessions follow each other: after a resume a rollout that was rolled back appears
again, under another `branch`; the later line counts. A line is synced before the next batch is planned.
"""

UNITS = (("_tokens_per_s", "tokens/s"), ("_share", "fraction of 1"), ("_tokens_mean", "tokens"), ("_s", "s"))
"""Suffix of a name -> unit; the first match counts."""

OTHER_UNITS = {
    "num_rollout": "rollout batches",
    "staleness_mean": "versions",
    "staleness_max": "versions",
    "generated": "groups",
    "trained": "groups",
    "pending": "groups",
    "in_flight": "groups",
    "dropped": "groups by reason",
    "spanning_samples": "samples",
    "update_weights_wire_bytes": "bytes",
    "update_weights_density": "fraction of 1",
    "groups_aborted": "groups",
    "failed_samples": "samples by reason",
    "drifted_tokens": "tokens",
    "response_tokens_median": "tokens",
    "response_tokens_min": "tokens",
    "response_tokens_max": "tokens",
    "zero_std": "groups by reward",
    "prefix_cache_hit_rate": "fraction of 1",
    "alarm_levels": "thresholds",
}

MEANINGS = {
    "branch": "The session that trained the batch; each start and each resume opens a branch.",
    "rollout_id": "Number of the rollout batch, from 0.",
    "num_rollout": "`--num-rollout`: batches of the whole run.",
    "policy_version": "Policy version that the engines served when the batch was planned.",
    "reward_mean": "Mean reward of the batch's samples.",
    "reward_std": "Standard deviation of the same rewards.",
    "response_tokens_mean": "Mean response length of the batch's samples.",
    "response_tokens_min": "Shortest response of the batch.",
    "response_tokens_max": "Longest response of the batch.",
    "truncated_share": "Share of samples that reached `--rollout-max-response-len`.",
    "staleness_mean": "Mean over samples of `policy_version` minus the version of the sample's oldest token.",
    "staleness_max": "Largest such difference.",
    "trained_tokens_per_s": "Response tokens of the batch, divided by `step_s`.",
    "generated_tokens_per_s": "Response tokens of groups accepted since the line before, divided by `step_s`.",
    "wait_s": "The trainer waited for enough groups.",
    "train_s": "From there until the batch was trained: planning, storing the plan, starting ranks that were released, "
    "reading, training, recording.",
    "publish_s": "From there until commit and publication, if any, were done, as far as the trainer waits for them.",
    "pause_s": "How long the engines stood still for the publication; 0 when there was none.",
    "publication_s": "How long the publication took, also where the trainer did not wait; 0 when none ended.",
    "update_weights_wire_bytes": "Bytes that the publication sent, or wrote to disk; 0 when there was none.",
    "update_weights_density": "Share of the weights' bytes that travelled as changed; 1 for whole versions.",
    "step_s": "`wait_s` + `train_s` + `publish_s`.",
    "trainer_idle_share": "Time in which the trainer waited for groups, of the time since the first batch began.",
    "generator_idle_share": "Time without a request in flight, of the time since the producers were first admitted.",
    "generated": "Groups that were ever leased; always trained + pending + in_flight + dropped.",
    "trained": "Groups trained along this branch and its ancestors.",
    "pending": "Groups accepted and not trained.",
    "in_flight": "Groups leased now, or leased before and waiting again.",
    "dropped": "Groups set aside for good, by reason; `vime queue dead` shows the letters of failed ones.",
    "groups_aborted": "Groups of this session that an engine aborted (a flush); they are generated again.",
    "failed_samples": "Samples of this session that failed, by reason, also those whose group was tried again.",
}

TRAIN_MEANINGS = {
    "loss": "What was minimised.",
    "pg_loss": "The policy objective with its masks, weights and corrections, without the entropy and KL terms.",
    "pg_clipfrac": "Share of tokens whose loss (ppo) or weight (cispo) is clipped; 0 for reinforce.",
    "ppo_kl": "Old minus current log-probability; with gspo the mean of the token's sequence.",
    "ois": "Importance ratio, current over old policy.",
    "entropy_loss": "Entropy of the policy at the response tokens, in nats.",
    "train_rollout_logprob_abs_diff": "Absolute difference of the sampler's log-probability and the trainer's: the old "
    "policy's, or the current one's with `--use-rollout-logprobs` and with score centering.",
    "kl_loss": "KL to the reference model by `--kl-loss-type`, before its coefficient.",
    "reward_kl": "KL of the old policy to the reference model, before `--kl-coef`.",
    "mtp_loss": "Cross-entropy of what the layers of `--mtp-num-layers` predict, the mean over their depths; `loss` is "
    "without it.",
    "rollout_entropy": "Entropy before the batch's first step, with `--use-rollout-entropy`.",
    "opsm_clipfrac": "Share of a sample's trained tokens that `--use-opsm` drops, a mean over samples.",
    "tis": "Importance ratio, trainer over sampler.",
    "tis_clipfrac": "Share of tokens whose importance weight differs from the ratio.",
    "tis_abs": "Distance of that ratio from 1.",
    "opd_reverse_kl": "Log-probability under the old policy minus that under the teacher.",
    "sc_correction": "Score-centering correction.",
    "sc_sampler_head_mass": "Sampler probability of the candidates that the correction sums over.",
    "sc_train_head_mass": "Trainer probability of the same candidates.",
    "sc_importance_weight": "Importance weight of the sampled token under score centering.",
    "num_replayed_routes": "Tokens whose recorded experts were replayed.",
    "num_routes": "Tokens whose experts could be replayed: all but the last of each sequence.",
    "routing_replay_fraction": "The first of these divided by the second; below 1 is an alarm of the step.",
    "num_tokens": "Tokens that counted in the loss.",
    "grad_norm": "Gradient norm before clipping.",
    "lr": "Learning rate that the step used.",
}
CRITIC_MEANINGS = {
    "value_loss": "Squared difference of value and return, the larger one of that and the same with the value kept "
    "within `--value-clip` of the one before the batch.",
    "value_clipfrac": "Share of tokens whose value moved further than that.",
    "value_explained_variance": "1 - Var(return - value) / Var(return) over the step's trained tokens, with the values "
    "from before the batch: 1 is a perfect critic, 0 one that is as good as a constant.",
    "critic_grad_norm": "The critic's gradient norm before clipping.",
    "critic_lr": "The critic's learning rate.",
}
BESIDE_THE_LOSS = ("grad_norm", "lr")
"""What `MegatronTrainer.train_step` adds to them."""

TRAIN_INTRODUCTION = """\
## `train`

Values of the batch's last optimizer step, equal on all ranks. All but `grad_norm`, `lr` and the numbers of tokens and
routes are aggregated like the loss: a mean over samples, or over tokens with `--calculate-per-token-loss`. A function
of `--custom-tis-function-path` adds its own.
"""


SAMPLES_INTRODUCTION = """\
## `sample_metrics`

What is known of the samples of the batch beside the fields above. TensorBoard and W&B have these under the same names.
"""


EVALUATION_INTRODUCTION = """\
## An evaluation

A line with the key `evaluation` is one of these ([what they mean](evaluation.md)); lines of rollout batches have no
such key.
"""


SINKS_INTRODUCTION = """\
## Series

What TensorBoard and W&B are given ([how](metrics_out.md)), by the field that it comes from. Beside these:
`rollout/step` (the rollout batch; TensorBoard has it as its step), `train/step` (the number of the batch's last
optimizer step, from 0) and, of an evaluation, its `metrics` under their own names.
"""


PROMETHEUS_INTRODUCTION = """\
## Prometheus

What `/metrics` of each role answers ([how](metrics_out.md)); a metric of several values has the label `name`.
"""


def series_rows(source: str) -> list[str]:
    """A table of the series, from the assignments of the module that names them."""
    lines = ["| series | field |", "|---|---|"]
    tables = literals(source)
    lines += [f"| `{name}` | `{field}` |" for name, field in tables["SERIES"].items()]
    lines += [f"| `{prefix}NAME` | `{field}` |" for prefix, field in tables["FAMILIES"].items()]
    return lines


def literals(source: str) -> dict[str, dict[str, str]]:
    """The dictionaries of text that a module assigns to annotated names, by these names."""
    return {
        ast.unparse(node.target): ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }


def prometheus_rows(sources: dict[str, tuple[str, str]], families_source: str) -> list[str]:
    """A table of the exported metrics. `sources`: role -> (source, struct)."""
    (counters,) = [
        ast.literal_eval(node.value.args[0])
        for node in ast.parse(families_source).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "COUNTERS"
        and isinstance(node.value, ast.Call)
    ]
    lines = ["| metric | kind | of |", "|---|---|---|"]
    for role, (source, struct) in sources.items():
        for name, kind, _ in record_fields(source, struct):
            if kind in NUMBERS:
                total, metric = ("_total", "counter") if name in counters else ("", "gauge")
                lines.append(f"| `vime_{role}_{name}{total}` | {metric} | `{struct}.{name}` |")
    return lines


def record_fields(source: str, struct: str = "StepRecord") -> list[tuple[str, str, str]]:
    """(name, type, docstring) of each field of a struct; an empty docstring where the field has none."""
    record = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == struct)
    fields: list[tuple[str, str, str]] = []
    for node in record.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields.append((node.target.id, ast.unparse(node.annotation), ""))
        elif fields and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            name, kind, _ = fields[-1]
            fields[-1] = (name, kind, " ".join(str(node.value.value).split()))
    return fields


def loss_metrics(source: str, variable: str) -> list[str]:
    """The names in `METRIC_NAMES` or `OPTIONAL_METRIC_NAMES`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return list(ast.literal_eval(node.value))
    raise SystemExit(f"{variable} is not in the trainer's loss any more; change this script.")


def unit_of(name: str) -> str:
    """Unit of a field, empty where it has none."""
    return OTHER_UNITS.get(name) or next((unit for suffix, unit in UNITS if name.endswith(suffix)), "")


def _train_rows(names: list[str]) -> list[str]:
    """A table of the trainer's metrics."""
    lines = ["| name | meaning |", "|---|---|"]
    meanings = {**TRAIN_MEANINGS, **CRITIC_MEANINGS}
    for name in names:
        if name not in meanings:
            raise SystemExit(f"The trainer's metric {name} has no entry in TRAIN_MEANINGS. Give it one.")
        lines.append(f"| `{name}` | {meanings[name]} |")
    return lines


def _record_rows(source: str, struct: str) -> list[str]:
    """A table of a struct's fields."""
    lines = ["| name | type | unit | meaning |", "|---|---|---|---|"]
    for name, kind, docstring in record_fields(source, struct):
        meaning = docstring or MEANINGS.get(name)
        if meaning is None:
            raise SystemExit(f"{struct}.{name} has no docstring and no entry in MEANINGS. Give it one.")
        lines.append(f"| `{name}` | `{kind.replace('|', '&#124;')}` | {unit_of(name)} | {meaning} |")
    return lines


def render(
    record_source: str, loss_source: str, critic_source: str, evaluation_source: str, samples_source: str
) -> str:
    """What is in the run folder. Ends the program with a message when a field has no meaning."""
    lines = [INTRODUCTION, *_record_rows(record_source, "StepRecord")]
    always = [*loss_metrics(loss_source, "METRIC_NAMES"), *BESIDE_THE_LOSS]
    sometimes = loss_metrics(loss_source, "OPTIONAL_METRIC_NAMES")
    lines += ["", TRAIN_INTRODUCTION, *_train_rows(always), "", "Where the objective has them:", ""]
    lines += _train_rows(sometimes)
    lines += ["", "With ppo; in the first `--num-critic-only-steps` batches these alone:", ""]
    lines += _train_rows(loss_metrics(critic_source, "METRIC_NAMES"))
    meanings = literals(samples_source)["MEANINGS"]
    lines += ["", SAMPLES_INTRODUCTION, "| name | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
    lines += ["", EVALUATION_INTRODUCTION, *_record_rows(evaluation_source, "EvaluationRecord")]
    lines += ["", "Of each data set:", "", *_record_rows(evaluation_source, "DataSetResult")]
    return "\n".join(lines) + "\n"


def render_copies(
    record_source: str, series_source: str, families_source: str, records_source: str, messages_source: str
) -> str:
    """What goes elsewhere."""
    lines = ["", SINKS_INTRODUCTION, *series_rows(series_source), "", PROMETHEUS_INTRODUCTION]
    roles = {
        "run": (record_source, "StepRecord"),
        "evaluation": (records_source, "EvaluationNumbers"),
        "coordinator": (messages_source, "QueueCounts"),
        "producer": (messages_source, "ProducerStats"),
        "trainer": (messages_source, "TrainReport"),
    }
    return "\n".join([*lines, *prometheus_rows(roles, families_source)]) + "\n"


def whole_page() -> str:
    """`docs/metrics.md`. Ends the program with a message when a field has no meaning."""
    in_the_run_folder = render(*(source.read_text() for source in (RECORD, LOSS, CRITIC, EVALUATION, SAMPLE_METRICS)))
    elsewhere = render_copies(*(source.read_text() for source in (RECORD, SERIES, FAMILIES, ROLE_RECORDS, MESSAGES)))
    return in_the_run_folder + elsewhere


if __name__ == "__main__":
    TARGET.write_text(whole_page())
    print(f"Wrote {TARGET}.")
