"""Panels, timeline and words of a run, from its steps alone."""

import pytest

from pipeline.incidents import Incident
from tests.support.step_records import step_record
from vime.view.figures import MOST_POINTS, panel_figure, timeline_figure
from vime.view.metrics import Evaluation, RunMetrics
from vime.view.panels import PANELS, newest_words, panel_lines
from vime.view.timeline import timeline
from vime.view.words import bottleneck_words, summary

BY_KEY = {panel.key: panel for panel in PANELS}


def test_there_are_the_twelve_numbers() -> None:
    assert list(BY_KEY) == [
        "reward", "signal", "length", "loss", "grad_norm", "entropy", "gap", "age", "queue", "tokens", "idle", "drops",
    ]  # fmt: skip


def test_drops_have_a_line_for_each_reason_that_was_ever_seen() -> None:
    steps = [step_record(0), step_record(1, dropped={"timeout": 2}), step_record(2, dropped={"timeout": 3, "bad": 1})]
    lines = {plotted.line.name: plotted.values for plotted in panel_lines(BY_KEY["drops"], steps)}
    assert lines == {"bad": [0, 0, 1], "timeout": [0, 2, 3]}
    assert newest_words(panel_lines(BY_KEY["drops"], [])) == "none"


def test_a_number_that_a_step_lacks_or_that_is_not_finite_is_a_gap() -> None:
    steps = [step_record(0, train={}), step_record(1, train={"loss": float("nan")}), step_record(2)]
    (loss,) = panel_lines(BY_KEY["loss"], steps)
    assert loss.values == [None, None, 0.1]


def test_a_long_run_is_thinned_out_and_keeps_its_newest_point() -> None:
    steps = [step_record(n) for n in range(2 * MOST_POINTS + 7)]
    figure = panel_figure({"": panel_lines(BY_KEY["loss"], steps)}, "")
    assert len(figure["data"][0]["x"]) <= MOST_POINTS + 1
    assert figure["data"][0]["x"][-1] == steps[-1].rollout_id


def test_runs_that_are_compared_have_a_colour_each_and_never_add_up() -> None:
    lines = panel_lines(BY_KEY["drops"], [step_record(1, dropped={"timeout": 1, "stale": 2})])
    alone = panel_figure({"": lines}, "groups", stacked=True)["data"]
    assert len({trace["line"]["color"] for trace in alone}) == 2
    assert [trace["stackgroup"] for trace in alone] == ["one", "one"]
    both = panel_figure({"a": lines, "b": lines}, "groups", stacked=True)["data"]
    assert [(trace["name"], trace["line"]["color"] == both[0]["line"]["color"]) for trace in both] == [
        ("a stale", True), ("a timeout", True), ("b stale", False), ("b timeout", False)
    ]  # fmt: skip
    assert not any("stackgroup" in trace for trace in both)
    assert both[0]["line"]["dash"] != both[1]["line"]["dash"]


def test_a_panel_without_a_number_says_so_and_has_no_axes() -> None:
    figure = panel_figure({"": panel_lines(BY_KEY["drops"], [step_record(1)])}, "groups", stacked=True)
    assert figure["data"] == []
    assert [words["text"] for words in figure["layout"]["annotations"]] == ["nothing to plot"]
    assert not figure["layout"]["xaxis"]["visible"]


def test_waiting_training_and_publishing_follow_each_other_up_to_the_line() -> None:
    found = {interval.kind: interval for interval in timeline([step_record(1)])}
    ends = {kind: interval.start_s + interval.seconds for kind, interval in found.items()}
    assert found["wait"].start_s == pytest.approx(1010 - 9)
    assert ends["wait"] == pytest.approx(found["train"].start_s)
    assert ends["train"] == pytest.approx(found["publish"].start_s)
    assert ends["publish"] == pytest.approx(1010)
    assert found["pause"].start_s == pytest.approx(1009.5)
    assert found["generate"].seconds == pytest.approx(9)


def test_a_commit_comes_between_training_and_publishing_or_goes_on_beside_the_next_batch() -> None:
    def shown(committed_s: float) -> dict[str, tuple[float, float]]:
        found = timeline([step_record(1)], commits={1: committed_s})
        return {i.kind: (i.start_s, i.start_s + i.seconds) for i in found if i.kind in ("save", "publish")}

    assert shown(1009.25) == {"save": (1008, 1009.25), "publish": (1009.25, 1010)}
    assert shown(1013.0) == {"save": (1008, 1013), "publish": (1008, 1010)}, "--async-save"
    assert shown(5000.0) == {"publish": (1008, 1010)}, "a copy that did not keep the times of its files"


def test_a_batch_that_was_not_published_shows_no_publication() -> None:
    last = step_record(2, pause_s=0.0, update_weights_wire_bytes=0)
    found = timeline([step_record(1), last], commits={2: 1019.5})
    assert [interval.words for interval in found if interval.kind in ("save", "publish")] == [
        "batch 1: published in 2.00 s", "batch 2: committed in 1.50 s"
    ]  # fmt: skip


def test_an_engine_is_out_until_it_serves_again_and_an_error_that_ended_the_run_has_its_place() -> None:
    incidents = [
        Incident(1002.0, "engine", "http://e0", "engine_0 is dead"),
        Incident(1003.0, "engine", "http://e1", "engine_1 is dead"),
        Incident(1005.0, "engine", "http://e0"),
        Incident(1006.0, "ended", text="no engine is left"),
    ]
    found = timeline([step_record(1)], incidents=incidents)
    outages = {each.words: (each.start_s, each.seconds) for each in found if each.kind == "outage"}
    assert outages == {"engine_0 is dead": (1002, 3), "engine_1 is dead": (1003, 16)}, "to the end of what is shown"
    assert [(each.start_s, each.words) for each in found if each.kind == "end"] == [(1006, "no engine is left")]
    later = timeline([step_record(1)], incidents=[*incidents[:2], Incident(1004.0, "session")])
    assert [each.seconds for each in later if each.kind == "outage"] == [2, 1]


def test_a_session_that_goes_on_has_its_place() -> None:
    found = timeline([step_record(1), step_record(2, branch="c"), step_record(3, branch="c")])
    assert [(each.start_s, each.words) for each in found if each.kind == "start"] == [
        (1011, "batch 2: session c goes on")
    ]


def test_the_reward_has_a_row_of_its_own_as_strong_as_its_share() -> None:
    found = timeline([step_record(1), step_record(2, reward_time_share=0.4, reward="judges.slow")])
    (reward,) = [interval for interval in found if interval.kind == "reward"]
    assert (reward.start_s, reward.seconds, reward.intensity) == (1011, 9, 0.4)
    assert reward.words == "batch 2: samples spent 40% of their time in the reward judges.slow"


def test_the_timeline_has_commits_evaluations_and_failures_of_its_time() -> None:
    evaluation = Evaluation(1, 1012.0, 3.0, {}, "")
    found = timeline(
        [step_record(1)], [evaluation], {0: 500.0, 1: 1009.0}, [(400.0, "old"), (1005.0, "group 3: timeout")]
    )
    assert [interval.words for interval in found if interval.kind == "save"] == ["batch 1: committed in 1.00 s"]
    assert [interval.start_s for interval in found if interval.kind == "evaluate"] == [1009.0]
    assert [interval.words for interval in found if interval.kind == "failure"] == ["group 3: timeout"]


def test_the_timeline_shows_batches_first_however_late_an_evaluation_is() -> None:
    steps, evaluation = [step_record(1), step_record(2)], Evaluation(2, 9000.0, 3.0, {}, "")
    figure = timeline_figure(timeline(steps, [evaluation], {1: 1009.5}))
    begin, end = figure["layout"]["xaxis"]["range"]
    assert begin < 1001e3 < 1020e3 < end < 1030e3
    types = {trace["name"]: trace["type"] for trace in figure["data"]}
    assert types == {
        "generate": "bar", "wait": "bar", "train": "bar", "publish": "bar", "pause": "bar", "evaluate": "bar",
        "save": "bar",
    }  # fmt: skip


def test_the_summary_tells_progress_reward_groups_and_time() -> None:
    steps = [step_record(0, reward_mean=0.25), step_record(1, dropped={"timeout": 2}, reward_mean=0.75)]
    text = " ".join(summary(RunMetrics(steps, num_rolled_back=3), is_running=False))
    for part in (
        "is not running: 2 of 20 rollout batches", "from 0.25 to 0.75", "2 dropped (2 timeout)", "9.00 s in the median",
        "3 batches rolled back",
    ):  # fmt: skip
        assert part in text
    assert bottleneck_words(steps).startswith("Generation is the bottleneck")
    assert summary(RunMetrics(), is_running=False) == ["The run has trained nothing."]
