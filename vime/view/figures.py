"""Plotly figures of panels and of the timeline, as the plain objects that Plotly takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.view.panels import PlottedLine
from vime.view.timeline import Interval

Figure = dict[str, Any]

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
DASHES = ("solid", "dot", "dash", "longdash", "dashdot")
"""Lines of one run, where several runs are compared."""
PROCESS_COLOURS = {
    "generate": "#059669",
    "reward": "#4d7c0f",
    "wait": "#a1a1aa",
    "train": "#2563eb",
    "save": "#7c3aed",
    "publish": "#d97706",
    "pause": "#dc2626",
    "evaluate": "#0891b2",
    "stall": "#be185d",
    "outage": "#dc2626",
    "failure": "#dc2626",
    "start": "#0891b2",
    "end": "#18181b",
}
BESIDE = ("evaluate", "outage", "failure", "end")
"""Kinds that may lie far from the batches that are shown; the timeline begins with those."""
PANEL_HEIGHT, TIMELINE_HEIGHT = "210px", "420px"
FEW_BATCHES = 10
"""With fewer, each has a tick: there is nothing between two batches."""
MOST_POINTS = 2000
"""Of a line; longer ones are thinned out evenly, with the newest point kept."""


def panel_figure(runs: Mapping[str, Sequence[PlottedLine]], unit: str, *, stacked: bool = False) -> Figure:
    """One panel with the lines of one run, or of several that are compared, each run in a colour of its own."""
    traces: list[Figure] = []
    are_compared = len(runs) > 1
    for run, (name, lines) in enumerate(runs.items()):
        for number, plotted in enumerate(lines):
            traces += _line_traces(
                plotted,
                " ".join(part for part in (name, plotted.line.name) if part),
                COLOURS[(run if are_compared else number) % len(COLOURS)],
                DASHES[(number if are_compared else plotted.line.second_axis) % len(DASHES)],
                stacked=stacked and not are_compared,
            )
    layout = _layout()
    if not any(trace["x"] for trace in traces):
        return {"data": [], "layout": layout | _empty()}
    layout["xaxis"] |= {"title": {"text": "rollout batch"}, "rangemode": "tozero"}
    if all(len(plotted.rollouts) < FEW_BATCHES for lines in runs.values() for plotted in lines):
        layout["xaxis"]["dtick"] = 1
    layout["yaxis"] |= {"title": {"text": unit}}
    layout["showlegend"] = sum(map(len, runs.values())) > 1
    if any(trace.get("yaxis") == "y2" for trace in traces):
        layout["yaxis2"] = {"overlaying": "y", "side": "right", "range": [0, 1], "tickformat": ".0%", "showgrid": False,
                            "tickvals": [0, 0.5, 1],
                            "automargin": True}  # fmt: skip
    if unit == "share":
        layout["yaxis"] |= {"tickformat": ".0%", "range": [0, 1.02]}
    return {"data": traces, "layout": layout}


def timeline_figure(intervals: Sequence[Interval]) -> Figure:
    """One row for each kind of process, time to the right."""
    kinds = dict.fromkeys(interval.kind for interval in intervals)
    traces = [_kind_trace(kind, [interval for interval in intervals if interval.kind == kind]) for kind in kinds]
    layout = _layout()
    layout["xaxis"] |= {"type": "date", "title": {"text": "time (UTC)"}}
    running = [interval for interval in intervals if interval.kind not in BESIDE]
    if running:
        begin = min(interval.start_s for interval in running)
        end = max(interval.start_s + interval.seconds for interval in running)
        layout["xaxis"]["range"] = [1000 * begin - 20 * (end - begin), 1000 * end + 20 * (end - begin)]
    layout["yaxis"] |= {
        "autorange": "reversed",
        "categoryorder": "array",
        "categoryarray": [kind for kind in PROCESS_COLOURS if kind in kinds],
    }
    layout |= {"barmode": "overlay", "showlegend": False, "bargap": 0.25, "hovermode": "closest"}
    layout["margin"]["l"] = 90
    return {"data": traces, "layout": layout}


def _kind_trace(kind: str, intervals: Sequence[Interval]) -> Figure:
    """Bars, or diamonds for what takes no time."""
    common: Figure = {
        "name": kind,
        "y": [kind] * len(intervals),
        "text": [interval.words for interval in intervals],
        "hovertemplate": "%{text}<extra>" + kind + "</extra>",
    }
    starts = [interval.start_s * 1000 for interval in intervals]
    colour = PROCESS_COLOURS.get(kind, COLOURS[0])
    if not any(interval.seconds for interval in intervals):
        marker: Figure = {"color": colour, "symbol": "diamond", "size": 9}
        return {**common, "type": "scatter", "mode": "markers", "x": starts, "marker": marker}
    return {
        **common,
        "type": "bar",
        "orientation": "h",
        "base": starts,
        "x": [interval.seconds * 1000 for interval in intervals],
        "textposition": "none",
        "marker": {"color": colour, "opacity": [interval.intensity for interval in intervals], "line": {"width": 0}},
    }


def _line_traces(plotted: PlottedLine, name: str, colour: str, dash: str, *, stacked: bool) -> list[Figure]:
    keep = _kept(len(plotted.rollouts))
    x, y = [plotted.rollouts[n] for n in keep], [plotted.values[n] for n in keep]
    line: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < 60 else "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 1.6, "dash": dash},
        "marker": {"size": 4},
    }
    if plotted.line.second_axis:
        line["yaxis"] = "y2"
    if stacked:
        line["stackgroup"] = "one"
    if plotted.spreads is None:
        return [line]
    spreads = [plotted.spreads[n] for n in keep]
    pairs = [(v, s) for v, s in zip(y, spreads, strict=True)]
    shared = {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "hoverinfo": "skip",
        "showlegend": False,
        "line": {"width": 0},
    }
    low = [None if v is None or s is None else v - s for v, s in pairs]
    high = [None if v is None or s is None else v + s for v, s in pairs]
    band = {"name": "spread", "fill": "tonexty", "fillcolor": _faint(colour)}
    return [line, {**shared, "name": "low", "y": low}, {**shared, **band, "y": high}]


def _kept(length: int) -> list[int]:
    if length <= MOST_POINTS:
        return list(range(length))
    every = -(-length // MOST_POINTS)
    return sorted({*range(0, length, every), length - 1})


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _empty() -> Figure:
    """A layout's part in the place of axes that would measure nothing."""
    words = {"text": "nothing to plot", "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    return {"xaxis": {"visible": False}, "yaxis": {"visible": False}, "annotations": [words]}


def _layout() -> Figure:
    axis = {
        "gridcolor": "#e4e4e7",
        "zerolinecolor": "#d4d4d8",
        "automargin": True,
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
    }
    return {
        "margin": {"l": 48, "r": 16, "t": 8, "b": 36},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11, "family": "system-ui, sans-serif", "color": "#3f3f46"},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.0, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
        "uirevision": "keep",
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }
