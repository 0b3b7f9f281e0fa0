"""The Dash application: which page an address shows, and what is updated while it is open. It only reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import dash
from dash import ALL, MATCH, Input, Output, State, dcc, html

from pipeline.lineage import trace_sample
from pipeline.sample_view import SampleView, show_sample
from pipeline.token_text import token_text
from vime.errors import SettingsError, VimeError
from vime.view.pages.history import compare_page, dead_page, history_page, timeline_page
from vime.view.pages.overview import overview, panel_figures, panel_values, words
from vime.view.pages.parts import Component, card, nothing
from vime.view.pages.sample import coloured_tokens, group_page, sample_page
from vime.view.pages.samples import GRID, MATCHING, grid, matching_words, query_of, samples_page
from vime.view.run_watch import RunWatch
from vime.view.tokens import COLOURINGS

TICK_MS = 2000
PAGES = {
    "/": "Overview",
    "/samples": "Samples",
    "/timeline": "Timeline",
    "/dead": "Dead letters",
    "/history": "Branches and commits",
    "/compare": "Compare",
}
LIVE_PAGES = ("/timeline", "/dead", "/history", "/compare")
"""Drawn anew when something has changed; the overview is updated in place."""


_READ_ROWS_AGAIN = """(serial, ids) => {
    ids.forEach(id => dash_ag_grid.getApi(id).refreshInfiniteCache());
    return dash_clientside.no_update;
}"""
"""In the browser: a grid asks anew for the rows that it shows; the place stays."""


def make_app(watches: Sequence[RunWatch]) -> dash.Dash:
    """The application for a run and those that it is compared with."""
    app = dash.Dash(
        "vime",
        assets_folder=str(Path(__file__).parent / "assets"),
        title=f"vime {watches[0].name}",
        update_title="",
        suppress_callback_exceptions=True,
    )
    app.layout = _layout(watches[0])
    Callbacks(watches).register(app)
    return app


class Callbacks:
    """What the pages ask for."""

    def __init__(self, watches: Sequence[RunWatch]) -> None:
        self._watches, self._watch = watches, watches[0]
        self._shown: SampleView | None = None
        """The sample that was opened last: its colours are changed without reading it again."""
        self._text_of: Callable[[], Callable[[int], str] | None] = cache(lambda: token_text(self._watch.location))

    def register(self, app: dash.Dash) -> None:
        path = Input("url", "pathname")
        app.callback(Output("page", "children"), Output("navigation", "children"), path)(self.page)
        app.callback(Output("heading", "children"), Output("problems", "children"), Input("tick", "n_intervals"))(
            self.heading
        )
        app.callback(
            Output("words", "children"),
            Output({"type": "plot", "panel": ALL}, "figure"),
            Output({"type": "value", "panel": ALL}, "children"),
            Output("overview-seen", "data"),
            Input("overview-tick", "n_intervals"),
            State("overview-seen", "data"),
            prevent_initial_call=True,
        )(self.update_overview)
        app.callback(
            Output("live", "children"),
            Output("live-seen", "data"),
            Input("live-tick", "n_intervals"),
            State("live-seen", "data"),
            State("url", "pathname"),
            prevent_initial_call=True,
        )(self.update_page)
        app.callback(
            Output("samples-seen", "data"),
            Input("samples-tick", "n_intervals"),
            State("samples-seen", "data"),
            prevent_initial_call=True,
        )(self.samples_changed)
        app.clientside_callback(
            _READ_ROWS_AGAIN,
            Output("grid-holder", "className"),
            Input("samples-seen", "data"),
            State({"type": GRID, "search": ALL}, "id"),
            prevent_initial_call=True,
        )
        app.callback(Output("grid-holder", "children"), Input("search", "value"), prevent_initial_call=True)(
            self.search
        )
        app.callback(
            Output({"type": GRID, "search": MATCH}, "getRowsResponse"),
            Output({"type": MATCHING, "search": MATCH}, "children"),
            Input({"type": GRID, "search": MATCH}, "getRowsRequest"),
            State({"type": GRID, "search": MATCH}, "id"),
        )(self.rows)
        app.callback(
            Output("url", "pathname"), Input({"type": GRID, "search": ALL}, "cellClicked"), prevent_initial_call=True
        )(self.open_sample)
        app.callback(
            Output("coloured", "children"), Input("colouring", "value"), State("url", "pathname"),
            prevent_initial_call=True,
        )(self.recolour)  # fmt: skip

    def page(self, path: str) -> tuple[Component, list[Component]]:
        links = [
            dcc.Link(title, href=address, className="here" if address == path else "")
            for address, title in PAGES.items()
            if address != "/compare" or len(self._watches) > 1
        ]
        return self._page(path), links

    def heading(self, _ticks: int | None) -> tuple[list[Component], list[Component]]:
        state = self._watch.state
        running = "running" if state.is_running else "not running"
        heading = [
            html.Strong(self._watch.name),
            html.Span(running, className=f"badge {running.replace(' ', '-')}"),
            html.Span(str(self._watch.location.root), className="note"),
        ]
        return heading, [html.P(problem, className="problem") for problem in state.problems]

    def update_overview(self, _ticks: int, seen: int) -> tuple[Any, ...]:
        state = self._watch.state
        if state.serial == seen:
            raise dash.exceptions.PreventUpdate
        return words(state), panel_figures(state), panel_values(state), state.serial

    def update_page(self, _ticks: int, seen: int, path: str) -> tuple[Component, int]:
        serial = self._serial()
        if path not in LIVE_PAGES or serial == seen:
            raise dash.exceptions.PreventUpdate
        return self._live(path), serial

    def samples_changed(self, _ticks: int, seen: int) -> int:
        serial = self._watch.state.samples_serial
        if serial == seen:
            raise dash.exceptions.PreventUpdate
        return serial

    def search(self, text: str | None) -> Component:
        return grid(text or "")

    def rows(self, request: dict[str, Any] | None, grid_id: dict[str, str]) -> tuple[dict[str, Any], str]:
        if request is None:
            raise dash.exceptions.PreventUpdate
        page = self._watch.index.page(query_of(request, grid_id["search"]))
        rows = [{"id": str(row["sample_index"]), **row} for row in page.rows]
        words = matching_words(page.num_matching, self._watch.state.num_indexed)
        return {"rowData": rows, "rowCount": page.num_matching}, words

    def open_sample(self, clicks: list[dict[str, Any] | None]) -> str:
        clicked = next((click for click in clicks if click), None)
        if clicked is None:
            raise dash.exceptions.PreventUpdate
        return f"/sample/{clicked['rowId']}"

    def recolour(self, colouring: str, path: str) -> list[Component]:
        if colouring not in COLOURINGS:
            raise SettingsError(f"The colouring is {colouring!r}, allowed: {', '.join(COLOURINGS)}.")
        shown, number = self._shown, _number(path)
        if shown is None or shown.sample_index != number:
            try:
                shown = self._read(number)
            except VimeError as error:
                return [nothing(str(error))]
        return coloured_tokens(shown, colouring)

    def _page(self, path: str) -> Component:
        if path == "/":
            return html.Div([overview(self._watch.state), *_clock("overview", self._watch.state.serial)])
        if path == "/samples":
            return html.Div([samples_page(), *_clock("samples", self._watch.state.samples_serial)])
        number = _number(path)
        if path.startswith("/sample/") and number >= 0:
            return self._sample(number)
        if path.startswith("/group/") and number >= 0:
            return group_page(self._watch, number)
        if path in LIVE_PAGES:
            return html.Div([html.Div(self._live(path), id="live"), *_clock("live", self._serial())])
        return card("No such page", nothing(f"{path} is none of {', '.join(PAGES)}."))

    def _live(self, path: str) -> Component:
        state = self._watch.state
        pages: dict[str, Callable[[], Component]] = {
            "/timeline": lambda: timeline_page(state),
            "/dead": lambda: dead_page(state),
            "/history": lambda: history_page(state),
            "/compare": lambda: compare_page(self._watches),
        }
        return pages[path]()

    def _sample(self, sample_index: int) -> Component:
        """Everything about one sample; what can't be read says why."""
        try:
            view, trace = self._read(sample_index), trace_sample(self._watch.location, sample_index)
        except VimeError as error:
            return card(f"Sample {sample_index}", nothing(str(error)))
        self._shown = view
        return sample_page(view, trace, next(iter(COLOURINGS)))

    def _read(self, sample_index: int) -> SampleView:
        return show_sample(self._watch.location, sample_index, self._text_of())

    def _serial(self) -> int:
        return sum(watch.state.serial for watch in self._watches)


def _clock(name: str, serial: int) -> list[Component]:
    """What makes a page ask for news, and what it has seen."""
    return [dcc.Interval(id=f"{name}-tick", interval=TICK_MS), dcc.Store(id=f"{name}-seen", data=serial)]


def _layout(watch: RunWatch) -> Component:
    return html.Div(
        [
            dcc.Location(id="url"),
            dcc.Interval(id="tick", interval=TICK_MS),
            html.Header(
                [html.Div(html.Strong(watch.name), id="heading", className="heading"), html.Nav(id="navigation")]
            ),
            html.Div(id="problems"),
            html.Main(id="page"),
        ]
    )


def _number(path: str) -> int:
    """The number at the end of an address, -1 where there is none."""
    last = path.rpartition("/")[2]
    return int(last) if last.isdigit() and len(last) < 16 else -1
