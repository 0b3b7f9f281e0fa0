"""Components that several pages share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html

Component = Any
"""Dash's components have no types of their own."""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, id_: str = "") -> Component:
    """A plain table; None is shown as a dash, components are shown as they are."""
    head = html.Thead(html.Tr([html.Th(name) for name in columns]))
    body = html.Tbody([html.Tr([html.Td(_cell(value)) for value in row]) for row in rows])
    return html.Table([head, body], className="table", **({"id": id_} if id_ else {}))


def facts(pairs: Mapping[str, object]) -> Component:
    """Names with their values."""
    return html.Dl(
        [part for name, value in pairs.items() for part in (html.Dt(name), html.Dd(_cell(value)))], className="facts"
    )


def card(title: str, *children: Component, id_: str = "", note: str = "") -> Component:
    """A box with a heading."""
    heading = [html.H2(title), *([html.P(note, className="note")] if note else [])]
    return html.Section([*heading, *children], className="card", **({"id": id_} if id_ else {}))


def sample_link(sample_index: int) -> Component:
    """The page of a sample."""
    return dcc.Link(str(sample_index), href=f"/sample/{sample_index}")


def group_link(group_index: int) -> Component:
    """The page of a group."""
    return dcc.Link(str(group_index), href=f"/group/{group_index}")


def moment(time_s: float) -> str:
    """A moment in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def span(first: int | None, last: int | None) -> str | None:
    """Numbers from one to another; None where there are none."""
    return None if first is None else str(first) if first == last else f"{first} to {last}"


def nothing(words: str) -> Component:
    """Why there is nothing to show."""
    return html.P(words, className="nothing")


def _cell(value: object) -> Component:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int | float) else value
