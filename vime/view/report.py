"""One HTML file about a run, with everything that it shows inside."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from recovery.run_location import RunLocation
from vime.view.figures import PANEL_HEIGHT, TIMELINE_HEIGHT, panel_figure, timeline_figure
from vime.view.pages.history import TIMELINE_BATCHES
from vime.view.pages.parts import moment
from vime.view.panels import DROPS, PANELS, newest_words, panel_lines
from vime.view.run_watch import read_once
from vime.view.timeline import timeline
from vime.view.words import bottleneck_words, summary

_HERE = Path(__file__).parent


def report_html(location: RunLocation) -> str:
    """The file's content. Raises `StorageError` where the run can't be read at all."""
    state = read_once(location)
    lines = {panel.key: panel_lines(panel, state.metrics.steps) for panel in PANELS}
    figures = {
        panel.key: panel_figure({"": lines[panel.key]}, panel.unit, stacked=panel.key == DROPS) for panel in PANELS
    }
    steps = state.metrics.steps[-TIMELINE_BATCHES:]
    intervals = timeline(
        steps, state.metrics.evaluations, state.commits, stalls=state.stalls, incidents=state.incidents
    )
    figures["timeline"] = timeline_figure(intervals)
    environment = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=True)
    return environment.get_template("report.html").render(
        name=location.root.name,
        root=str(location.root),
        written=moment(time.time()),
        state=state,
        bottleneck=bottleneck_words(state.metrics.steps),
        summary=summary(state.metrics, is_running=state.is_running),
        panels=[
            {
                "key": panel.key,
                "title": panel.title,
                "unit": panel.unit,
                "meaning": panel.meaning,
                "value": newest_words(lines[panel.key]),
            }
            for panel in PANELS
        ],
        has_timeline=bool(intervals),
        newest=state.newest_messages,
        css=Markup((_HERE / "assets" / "view.css").read_text()),
        plotly=Markup(get_plotlyjs()),
        figures=Markup(msgspec.json.encode(figures).decode().replace("<", "\\u003c")),
        panel_height=PANEL_HEIGHT,
        timeline_height=TIMELINE_HEIGHT,
    )
