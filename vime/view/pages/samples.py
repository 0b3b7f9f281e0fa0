"""The table of samples: filtered, ordered and searched by the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_ag_grid
from dash import dcc, html

from vime.counted import agreeing, counted
from vime.errors import SettingsError
from vime.view.pages.parts import Component, nothing
from vime.view.sample_index import SHORTEST_SEARCH, WORDS, Condition, SampleQuery

GRID, MATCHING = "samples", "matching"
ROWS_AT_ONCE = 100
NUMBER_FILTERS = (
    "equals", "notEqual", "greaterThan", "greaterThanOrEqual", "lessThan", "lessThanOrEqual", "inRange", "blank",
    "notBlank",
)  # fmt: skip
WORD_FILTERS = ("equals", "notEqual", "contains", "notContains")
_TITLES = {
    "sample_index": "sample", "group_index": "group", "reward": "reward", "advantage": "advantage", "mean_gap": "gap",
    "state": "state", "status": "status", "rollout": "batch", "age_versions": "age", "prompt_tokens": "prompt tokens",
    "response_tokens": "response tokens", "trained_tokens": "trained tokens", "min_version": "oldest version",
    "max_version": "newest version", "source": "source",
}  # fmt: skip


def samples_page() -> Component:
    """A search box over a grid whose heads filter and order."""
    return html.Div(
        [
            dcc.Input(
                id="search", type="search", debounce=True, placeholder="text of prompt or response", className="search"
            ),
            html.Div(grid(""), id="grid-holder"),
        ]
    )


def grid(search: str) -> Component:
    """A grid of the samples that hold a text, and how many they are.

    What it searches for is part of its id, so a new search is a new grid.
    """
    if 0 < len(search) < SHORTEST_SEARCH:
        return nothing(f"A search needs at least {SHORTEST_SEARCH} characters.")
    columns: list[dict[str, Any]] = [
        {
            "field": name,
            "headerName": title,
            "filter": "agTextColumnFilter" if name in WORDS else "agNumberColumnFilter",
            "filterParams": {
                "maxNumConditions": 1,
                "buttons": ["reset"],
                "inRangeInclusive": True,
                "filterOptions": list(WORD_FILTERS if name in WORDS else NUMBER_FILTERS),
            },
            "width": 150 if " " in title or title == "advantage" else 110,
        }
        for name, title in _TITLES.items()
    ]
    for column in columns:
        if column["field"] in ("reward", "advantage", "mean_gap"):
            column["valueFormatter"] = {"function": "params.value == null ? '–' : d3.format('.4~g')(params.value)"}
    texts = [
        {"field": name, "headerName": name, "sortable": False, "filter": False, "width": 230, "tooltipField": name}
        for name in ("prompt", "response")
    ]
    found = dash_ag_grid.AgGrid(
        id={"type": GRID, "search": search},
        columnDefs=columns[:6] + texts + columns[6:],
        defaultColDef={"resizable": True, "sortable": True, "filter": True},
        rowModelType="infinite",
        getRowId="params.data.id",
        dashGridOptions={
            "cacheBlockSize": ROWS_AT_ONCE,
            "maxBlocksInCache": 20,
            "rowHeight": 30,
            "headerHeight": 36,
            "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
            "tooltipShowDelay": 400,
        },
        style={"height": "72vh"},
    )
    return html.Div([html.P(id={"type": MATCHING, "search": search}, className="note matching"), found])


def matching_words(num_matching: int, num_indexed: int) -> str:
    """How many samples there are to look at."""
    return (
        f"{num_matching:,} {agreeing(num_matching, 'sample')} found. "
        f"{counted(num_indexed, 'group')} in the index; a click opens a sample."
    )


def query_of(request: Mapping[str, Any], search: str) -> SampleQuery:
    """The query of a grid's request. Raises `SettingsError` for one that can't be answered."""
    conditions = tuple(_condition(name, model) for name, model in (request.get("filterModel") or {}).items())
    order = tuple(
        (str(entry["colId"]), "descending" if entry["sort"] == "desc" else "ascending")
        for entry in request.get("sortModel") or []
    )
    first, end = int(request["startRow"]), int(request["endRow"])
    return SampleQuery(
        text=search,
        conditions=conditions,
        order=order or SampleQuery().order,  # type: ignore[arg-type]
        offset=max(first, 0),
        limit=min(max(end - first, 1), 1000),
    )


def _condition(column: str, model: Mapping[str, Any]) -> Condition:
    if "type" not in model:
        raise SettingsError(f"The filter of {column} combines several conditions, allowed: one.")
    given = [model.get("filter"), *([model["filterTo"]] if "filterTo" in model else [])]
    return Condition(column, str(model["type"]), tuple(value for value in given if value is not None))
