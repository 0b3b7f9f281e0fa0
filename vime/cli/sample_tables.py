"""The reports of `vime sample` as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.lineage import SampleTrace, StepSample
from pipeline.sample_view import SampleView, TokenView
from storage.journal_replay import TaskEvent
from vime.cli.look import one_line, place_words, position_words, table


def show(view: SampleView, max_tokens: int | None) -> RenderableType:
    """`vime sample show`, with at most `max_tokens` response tokens (None: all)."""
    prompt = view.prompt if isinstance(view.prompt, str) else json.dumps(view.prompt, ensure_ascii=False)
    parts = ", ".join(f"{name} {value:g}" for name, value in view.reward_parts.items())
    spans = ", ".join(f"version {version}: {start} to {stop - 1}" for version, start, stop in view.version_spans)
    rows = [
        ("sample", f"{view.sample_index}, member {view.member} of group {view.group_index} ({view.state})"),
        ("found as", view.source),
        ("prompt", f"{place_words(view.place)}: {one_line(prompt)}"),
        ("label", one_line(json.dumps(view.label, ensure_ascii=False))),
        ("response", one_line(view.response)),
        ("status", view.status),
        ("reward", parts or json.dumps(view.reward)),
        (
            "tokens",
            f"{view.prompt_length} prompt + {view.response_length} response, {view.trained_length} of them trained",
        ),
        ("response by version", spans or "-"),
        ("trained in", _training(view)),
        ("metadata", one_line(json.dumps(view.metadata, ensure_ascii=False))),
        ("columns of its group", ", ".join(f"{c.name} {c.dtype}{c.shape}" for c in view.columns)),
    ]
    response = view.tokens[view.prompt_length :]
    shown = response if max_tokens is None else response[:max_tokens]
    return Group(_facts(rows), Text(""), _tokens(shown, view.prompt_length), _more(len(shown), len(response)))


def trace(found: SampleTrace) -> RenderableType:
    """`vime sample trace RUN ID`."""
    again = "" if found.requeued_from is None else f" (again, after group {found.requeued_from})"
    rows: list[tuple[str, str]] = [
        ("sample", f"{found.sample_index} of group {found.group_index} ({found.state})"),
        ("prompt", place_words(found.prompt) + again),
        *(("queue", _event(event)) for event in found.history),
        ("position", position_words(found.position) or "-"),
        ("stored in", found.stored_in or "-"),
    ]
    rows += [
        (
            "planned",
            f"rollout {step.rollout_id}, step {step.step}, rank {step.rank}, microbatch {step.microbatch} of "
            f"branch {step.branch}{_undone(step.counts)}: advantage {step.advantage:.4f}, policy version "
            f"{step.policy_version}, age {step.age_versions}",
        )
        for step in found.planned
    ]
    rows += [
        (
            "trained",
            f"rollout {step.rollout_id}, step {step.step}, rank {step.rank} of branch {step.branch}"
            f"{_undone(step.counts)}",
        )
        for step in found.trained
    ]
    rows.append(("committed", "not yet" if found.committed_by is None else f"by rollout {found.committed_by}"))
    return _facts(rows)


def step(samples: Sequence[StepSample]) -> RenderableType:
    """`vime sample trace RUN --step`."""
    rows = [
        (
            sample.sample_index,
            sample.group_index,
            f"{sample.rollout_id}.{sample.step}",
            sample.rank,
            None if sample.reward is None else f"{sample.reward:g}",
            None if sample.advantage is None else f"{sample.advantage:.4f}",
            sample.age_versions,
            place_words(sample.prompt),
            f"{sample.branch}{_undone(sample.counts)}",
        )
        for sample in samples
    ]
    numbers = ("sample", "group", "step", "rank", "reward", "advantage", "age")
    return table((*numbers, "prompt", "branch"), rows, right=numbers)


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    shown = table(("", ""), rows)
    shown.show_header = False
    return shown


def _tokens(tokens: Sequence[TokenView], prompt_length: int) -> Table:
    rows = [
        (
            token.position - prompt_length,
            token.token_id,
            None if token.text is None else json.dumps(token.text, ensure_ascii=False),
            None if token.log_prob is None else f"{token.log_prob:.4f}",
            None if token.gap is None else f"{token.gap:+.4f}",
            None if token.advantage is None else f"{token.advantage:.4f}",
            token.version,
            "yes" if token.trained else "no",
        )
        for token in tokens
    ]
    columns = ("response token", "id", "text", "log-probability", "gap", "advantage", "version", "trained")
    return table(columns, rows, right=[name for name in columns if name not in ("text", "trained")])


def _training(view: SampleView) -> str:
    step = view.training
    if step is None:
        return "-"
    gap = view.problem or ("" if view.mean_gap is None else f"mean gap {view.mean_gap:.4f} nats a token")
    return f"rollout {step.rollout_id}, step {step.step}, rank {step.rank}" + (f": {gap}" if gap else "")


def _more(num_shown: int, num_tokens: int) -> Text:
    return Text("" if num_shown == num_tokens else f"{num_shown} of {num_tokens} response tokens; --tokens shows more.")


def _event(event: TaskEvent) -> str:
    attempt = f" (attempt {event.attempt})" if event.attempt else ""
    return f"{event.what}{attempt}" + ("" if event.worker is None else f" to {event.worker}")


def _undone(counts: bool) -> str:
    return "" if counts else " (rolled back)"
