"""The first page: what is wrong in words, the numbers that matter as plots, and where the groups are."""

from __future__ import annotations

from dash import dcc, html

from vime.view.figures import PANEL_HEIGHT, Figure, panel_figure
from vime.view.pages.parts import Component, card, facts, nothing, span, table
from vime.view.panels import DROPS, PANELS, newest_words, panel_lines
from vime.view.run_watch import RunState
from vime.view.words import bottleneck_words, summary

PLOT_CONFIG = {"displayModeBar": False, "responsive": True}
PLOT_STYLE = {"height": PANEL_HEIGHT}


def overview(state: RunState) -> Component:
    """The whole page, to be updated in place by `words`, `panel_figures` and `panel_values`."""
    figures, values = panel_figures(state), panel_values(state)
    cards = [
        html.Section(
            [
                html.Div([html.H2(panel.title), html.Span(panel.unit, className="unit")], className="panel-head"),
                html.Div(value, id={"type": "value", "panel": panel.key}, className="value"),
                dcc.Graph(id={"type": "plot", "panel": panel.key}, figure=figure, config=PLOT_CONFIG, style=PLOT_STYLE),
                html.P(panel.meaning, className="note"),
            ],
            className="card panel",
            **{"data-panel": panel.key},
        )
        for panel, figure, value in zip(PANELS, figures, values, strict=True)
    ]
    return html.Div([html.Div(words(state), id="words", className="halves"), html.Div(cards, className="grid")])


def words(state: RunState) -> list[Component]:
    """What is above the plots."""
    said = html.Div(
        [
            html.P(bottleneck_words(state.metrics.steps), id="bottleneck", className="bottleneck"),
            *[html.P(sentence) for sentence in summary(state.metrics, is_running=state.is_running)],
        ],
        className="card words",
    )
    return [html.Div([said, _alarms(state)]), _queue(state)]


def panel_figures(state: RunState) -> list[Figure]:
    """A figure for each panel, in order."""
    return [
        panel_figure({"": panel_lines(panel, state.metrics.steps)}, panel.unit, stacked=panel.key == DROPS)
        for panel in PANELS
    ]


def panel_values(state: RunState) -> list[str]:
    """The newest numbers of each panel, in order."""
    return [newest_words(panel_lines(panel, state.metrics.steps)) for panel in PANELS]


def _alarms(state: RunState) -> Component:
    alarms = state.alarms
    if not alarms:
        return html.Div(html.P("No alarm: every threshold holds."), id="alarms", className="card quiet")
    rows = [
        html.Li([html.Strong(alarm.name), html.Span(f" {alarm.text} "), html.Em(alarm.what_to_do)]) for alarm in alarms
    ]
    return html.Div(html.Ul(rows), id="alarms", className="card alarms")


def _queue(state: RunState) -> Component:
    status = state.status
    if status is None:
        return card("Queue now", nothing("The queue of this run is not on the disk, or was not read yet."), id_="queue")
    identity = status.identity
    return card(
        "Queue now",
        facts(
            {
                "identity": str(identity),
                "leased now": status.num_leased,
                "oldest lease": None if status.oldest_lease_s is None else f"{status.oldest_lease_s:.1f} s",
                "waiting for another attempt": status.num_waiting,
                "prompts not begun": status.num_fresh,
                "pending versions": span(*(status.pending_versions or (None, None))),
                "newest commit": "none" if status.newest_commit is None else f"of batch {status.newest_commit}",
                "pool": f"{status.pool_bytes / 2**20:.1f} MiB, {status.free_bytes / 2**30:.1f} GiB free",
            }
        ),
        table(["failed for", "letters"], sorted(status.dead_letters.items())) if status.dead_letters else "",
        id_="queue",
    )
