"""One sample with its tokens and its way, and a group's samples side by side."""

from __future__ import annotations

import msgspec
from dash import dcc, html

from pipeline.lineage import SampleTrace
from pipeline.sample_view import SampleView
from vime.view.index_builder import prompt_text
from vime.view.pages.parts import Component, card, facts, group_link, nothing, sample_link, span, table
from vime.view.panels import shown
from vime.view.run_watch import RunWatch
from vime.view.sample_index import Condition, SampleQuery
from vime.view.tokens import COLOURINGS, coloured, legend

MOST_TOKENS = 4000
"""Shown of one response."""


def sample_page(view: SampleView, trace: SampleTrace, colouring: str) -> Component:
    """Everything about one sample."""
    return html.Div(
        [
            card(f"Sample {view.sample_index}", _facts(view)),
            card("Prompt", html.Pre(prompt_text(view.prompt), id="prompt", className="text")),
            card("Response", html.Pre(view.response, id="response", className="text")),
            card("Tokens", *_tokens(view, colouring), note="Point at a token to see what is known of it."),
            card("From prompt line to optimizer step", *_lineage(trace), id_="lineage"),
            card("Metadata", html.Pre(_json(view.metadata), className="text")),
        ]
    )


def group_page(watch: RunWatch, group_index: int) -> Component:
    """The samples of a group beside each other."""
    page = watch.index.page(
        SampleQuery(
            conditions=(Condition("group_index", "equals", (group_index,)),), order=(("member", "ascending"),), limit=64
        )
    )
    if not page.rows:
        return card(f"Group {group_index}", nothing("No accepted sample of this group is in the index (yet)."))
    columns = [
        html.Div(
            [
                html.H3(["sample ", sample_link(row["sample_index"])]),
                facts(
                    {
                        "reward": shown(row["reward"]),
                        "advantage": shown(row["advantage"]),
                        "gap": shown(row["mean_gap"]),
                        "status": row["status"],
                        "tokens": row["response_tokens"],
                        "versions": span(row["min_version"], row["max_version"]),
                    }
                ),
                html.Pre(row["response"], className="text"),
            ],
            className="member",
        )
        for row in page.rows
    ]
    first = page.rows[0]
    return html.Div(
        [
            card(f"Group {group_index}", facts({"state": first["state"], "batch": first["rollout"]})),
            card("Prompt", html.Pre(first["prompt"], className="text")),
            html.Div(columns, className="members", id="members"),
        ]
    )


def _facts(view: SampleView) -> Component:
    reward = shown(view.reward) if isinstance(view.reward, int | float) else _json(view.reward)
    return facts(
        {
            "group": html.Span([group_link(view.group_index), f", member {view.member}"]),
            "state": f"{view.state}, {view.source}",
            "reward": reward,
            **{f"reward: {name}": shown(value) for name, value in view.reward_parts.items()},
            "advantage": None if view.training is None else shown(view.training.advantage),
            "gap to the trainer": None if view.mean_gap is None else f"{shown(view.mean_gap)} nats a token in the mean",
            "label": _json(view.label),
            "status": view.status,
            "tokens": f"{view.prompt_length} prompt, {view.response_length} response, {view.trained_length} trained",
            "versions": ", ".join(f"{v} for tokens {first} to {stop - 1}" for v, first, stop in view.version_spans)
            or None,
        }
    )


def _tokens(view: SampleView, colouring: str) -> list[Component]:
    hidden = view.response_length - MOST_TOKENS
    notes = [_why_no_gap(view)] + ([f"{hidden} more tokens are not shown."] if hidden > 0 else [])
    return [
        dcc.RadioItems(list(COLOURINGS), colouring, id="colouring", inline=True, className="choices"),
        html.Div(coloured_tokens(view, colouring), id="coloured"),
        *(html.P(note, className="note") for note in notes if note),
    ]


def coloured_tokens(view: SampleView, colouring: str) -> list[Component]:
    """What the colours mean, and the response in them."""
    response = view.tokens[view.prompt_length :][:MOST_TOKENS]
    return [
        html.P(
            [
                part
                for entry in legend(response, colouring)
                for part in (html.Span(className="swatch", style={"background": entry.colour}), entry.words)
            ],
            id="legend",
            className="legend",
        ),
        html.Div(
            [
                html.Span(token.text, title=token.words, style={"background": token.colour})
                for token in coloured(response, colouring)
            ],
            id="tokens",
            className="tokens",
        ),
    ]


def _why_no_gap(view: SampleView) -> str:
    if view.problem:
        return view.problem
    if view.training is None:
        return "No trainer's log-probabilities: no step that counts has trained it (yet)."
    if view.mean_gap is None:
        return (
            "No trainer's log-probabilities: its step is under way, trained none of its tokens, or they were reclaimed."
        )
    return ""


def _lineage(trace: SampleTrace) -> list[Component]:
    prompt = trace.prompt
    place = None if prompt is None else (prompt.place or f"record {prompt.row}") + f", epoch {prompt.epoch}"
    steps = [
        (step.branch, step.rollout_id, step.step, step.rank, step.policy_version, step.age_versions,
         shown(step.advantage), "yes" if step.counts else "no, rolled back")
        for step in trace.planned
    ]  # fmt: skip
    taken = [(s.branch, s.rollout_id, s.step, s.rank, "yes" if s.counts else "no, rolled back") for s in trace.trained]
    history = [(event.what, event.attempt or None, event.worker) for event in trace.history]
    return [
        facts(
            {
                "prompt line": place,
                "requeued from group": trace.requeued_from,
                "segment and position": f"{trace.segment}, {trace.position}",
                "stored in": trace.stored_in,
                "committed by": None if trace.committed_by is None else f"commit of batch {trace.committed_by}",
            }
        ),
        html.H3("In the queue"),
        table(["what", "attempt", "worker"], history),
        html.H3("Planned"),
        table(["branch", "batch", "step", "rank", "policy version", "age", "advantage", "counts"], steps),
        html.H3("Trained"),
        table(["branch", "batch", "step", "rank", "counts"], taken, id_="trained"),
    ]


def _json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
