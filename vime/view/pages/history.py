"""Pages of what happened: timeline, dead letters, branches with commits, and runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from dash import dcc, html

from pipeline.dead_list import DeadRow
from vime.errors import StorageError
from vime.view.figures import TIMELINE_HEIGHT, panel_figure, timeline_figure
from vime.view.pages.overview import PLOT_CONFIG, PLOT_STYLE
from vime.view.pages.parts import Component, card, group_link, moment, nothing, sample_link, table
from vime.view.panels import DROPS, PANELS, newest_words, panel_lines
from vime.view.run_watch import RunState, RunWatch
from vime.view.settings_diff import differences, read_settings
from vime.view.timeline import timeline

TIMELINE_BATCHES = 50


def timeline_page(state: RunState) -> Component:
    """The last batches."""
    steps = state.metrics.steps[-TIMELINE_BATCHES:]
    if not steps:
        return card("Timeline", nothing("No batch was trained yet."))
    letters = [] if state.dead is None else [(row.letter.time_s, _letter_words(row)) for row in state.dead.letters]
    found = timeline(steps, state.metrics.evaluations, state.commits, letters, state.stalls, state.incidents)
    return card(
        "Timeline",
        dcc.Graph(
            id="timeline",
            figure=timeline_figure(found),
            config={"displaylogo": False, "responsive": True},
            style={"height": TIMELINE_HEIGHT},
        ),
        note=f"The last {len(steps)} batches. Waiting, training, saving and publishing take turns; generation and "
        "reward go on beside them: the stronger the colour, the more tokens per second, and the larger the share of "
        "the samples' time.",
    )


def dead_page(state: RunState) -> Component:
    """Samples that failed."""
    dead = state.dead
    if dead is None or not (dead.letters or dead.reasons):
        return card("Dead letters", nothing("No sample has failed."))
    reasons = [(count.reason, count.num_letters, count.num_groups_dropped) for count in dead.reasons]
    return html.Div(
        [
            card("Dead letters by reason", table(["reason", "letters", "groups dropped"], reasons, id_="reasons")),
            card(
                f"Newest {len(dead.letters)} of {dead.num_matching} (times in UTC)",
                *[_letter(row) for row in dead.letters],
                *[html.P(line, className="problem") for line in dead.unreadable],
            ),
        ]
    )


def history_page(state: RunState) -> Component:
    """Sessions, commits and segments."""
    history = state.history
    if history is None:
        return card("Branches", nothing("The queue of this run is not on the disk, or was not read yet."))
    branches = [
        (
            branch.branch,
            "the beginning"
            if branch.parent_branch is None
            else f"{branch.parent_branch}, batch {branch.parent_rollout}",
            branch.start_version,
            None if branch.rollouts is None else f"{branch.rollouts[0]} to {branch.rollouts[1]}",
            branch.num_groups_trained,
            branch.num_groups_rolled_back,
            ", ".join(map(str, branch.commits)) or None,
        )
        for branch in history.branches
    ]
    commits = [(rollout, moment(time_s)) for rollout, time_s in sorted(state.commits.items(), reverse=True)]
    segments = [
        (s.index, "open" if s.open else "closed", s.first_group, s.num_groups, s.num_accepted, sum(s.dropped.values()))
        for s in history.segments
    ]
    columns = ["branch", "grew from", "first version", "batches", "groups trained", "rolled back", "commits"]
    return html.Div(
        [
            card("Branches", table(columns, branches, id_="branches"), note="Each start and each resume opens one."),
            card("Commits", table(["batch", "written (UTC)"], commits, id_="commits")),
            card("Segments", table(["segment", "state", "first group", "groups", "accepted", "dropped"], segments)),
            *[card("Repair", html.Pre(line, className="text")) for line in history.repairs],
        ]
    )


def compare_page(watches: Sequence[RunWatch]) -> Component:
    """In which settings several runs differ, and their panels one over the other."""
    if len(watches) < 2:
        return card("Compare", nothing("Give several runs: vime view RUN --compare OTHER."))
    cards = []
    for panel in PANELS:
        runs = {watch.name: panel_lines(panel, watch.state.metrics.steps) for watch in watches}
        values = [html.P(f"{name}: {newest_words(lines)}", className="newest") for name, lines in runs.items()]
        graph = dcc.Graph(
            id={"type": "compared", "panel": panel.key},
            figure=panel_figure(runs, panel.unit, stacked=panel.key == DROPS),
            config=PLOT_CONFIG,
            style=PLOT_STYLE,
        )
        cards.append(card(panel.title, *values, graph))
    return html.Div([_settings(watches), html.Div(cards, className="grid", id="compared")])


def _settings(watches: Sequence[RunWatch]) -> Component:
    title = "Settings that differ"
    try:
        found = differences([read_settings(watch.location.root) for watch in watches])
    except StorageError as error:
        return card(title, nothing(str(error)))
    rows = [(flag, *("(on)" if value == "" else value for value in values)) for flag, values in found]
    names = [watch.name for watch in watches]
    return card(title, table(["flag", *names], rows, id_="settings") if rows else nothing("None."))


def _letter_words(row: DeadRow) -> str:
    return f"group {row.letter.group_index}: {row.letter.reason}"


def _letter(row: DeadRow) -> Component:
    letter = row.letter
    group = group_link(letter.group_index)
    samples: list[Component] = []
    for index in letter.sample_indices:
        samples += [sample_link(index), " "]
    now = row.state + ("" if row.requeued_as is None else f", requeued as group {row.requeued_as}")
    return html.Details(
        [
            html.Summary(
                [f"{moment(letter.time_s)} ", html.Strong(letter.reason), f" {letter.error}: {letter.message}"]
            ),
            html.P(
                ["group ", group, f" (now {now}), samples ", *samples, f"attempt {letter.attempt}, {letter.worker}"]
            ),
            *([html.Pre(letter.traceback, className="text")] if letter.traceback else []),
        ],
        className="letter",
    )
