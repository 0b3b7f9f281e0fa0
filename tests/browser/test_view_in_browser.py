"""`vime view` and `vime report` in Chromium, against what the run wrote."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from pipeline.sample_view import show_sample
from recovery.queue_report import status
from recovery.run_location import locate_run
from tests.browser.watched_page import STANDIN_FLAGS, WatchedPage, serve, watched_page
from tests.end_to_end.jobs import Job, stored_samples, wait_until
from vime.cli.main import main

pytestmark = [pytest.mark.browser, pytest.mark.multiproc, pytest.mark.timeout(600)]

Step = dict[str, Any]

SHOWN: dict[str, dict[str, Callable[[Step], float]]] = {
    "reward": {"mean": lambda step: step["reward_mean"]},
    "signal": {"share": lambda step: step["signal_share"]},
    "length": {
        "mean length": lambda step: step["response_tokens_mean"],
        "truncated": lambda step: step["truncated_share"],
    },
    "loss": {"loss": lambda step: step["train"]["loss"]},
    "grad_norm": {"norm": lambda step: step["train"]["grad_norm"]},
    "entropy": {"entropy": lambda step: step["train"]["entropy_loss"]},
    "gap": {"gap": lambda step: step["train"]["train_rollout_logprob_abs_diff"]},
    "age": {"mean": lambda step: step["staleness_mean"], "max": lambda step: step["staleness_max"]},
    "queue": {"pending": lambda step: step["pending"], "in flight": lambda step: step["in_flight"]},
    "tokens": {
        "generated": lambda step: step["generated_tokens_per_s"],
        "trained": lambda step: step["trained_tokens_per_s"],
    },
    "idle": {"trainer": lambda step: step["trainer_idle_share"], "engines": lambda step: step["generator_idle_share"]},
    "drops": {},
}


def step_samples(job: Job, rollout: int) -> list[int]:
    """Samples that a batch of one step has trained."""
    lines = (job.run / "training_log" / "rank_0.jsonl").read_text().splitlines()
    (entry,) = [entry for line in lines if (entry := json.loads(line))["rollout_id"] == rollout]
    return list(entry["sample_indices"])


def check_panels(page: WatchedPage, steps: list[Step]) -> None:
    for panel, lines in SHOWN.items():
        plotted = page.plotted(panel)
        for name, value in lines.items():
            assert plotted[name]["x"] == [step["rollout_id"] for step in steps], panel
            assert plotted[name]["y"] == pytest.approx([value(step) for step in steps]), panel


def test_every_panel_shows_the_numbers_of_metrics_jsonl(page: WatchedPage, stored: Job) -> None:
    page.open("/", ".panel")
    page.wait_for_plots(len(SHOWN))
    steps = stored.steps()
    assert len(steps) == stored.num_rollout
    check_panels(page, steps)
    spread = page.plotted("reward")["spread"]["y"]
    assert spread == pytest.approx([step["reward_mean"] + step["reward_std"] for step in steps])
    assert "is the bottleneck" in page.text("#bottleneck") or "keep pace" in page.text("#bottleneck")


def test_the_queue_is_shown_as_the_command_counts_it(
    page: WatchedPage, stored: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "status", str(stored.run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    identity = status["identity"]
    page.open("/", "#queue .facts")
    text = page.text("#queue")
    assert f"generated {identity['generated']} = trained {identity['trained']} + pending {identity['pending']}" in text
    assert f"of batch {status['newest_commit']}" in text


def test_samples_are_searched_filtered_and_opened(page: WatchedPage, stored: Job) -> None:
    samples = {sample.index: sample for sample in stored_samples(stored)}
    page.open("/samples", ".ag-row[row-id]")
    rows = page.page.locator(".ag-center-cols-container .ag-row")
    assert rows.first.get_attribute("row-id") == str(max(samples)), "newest first"
    wanted = samples[5]
    assert isinstance(wanted.prompt, str)
    page.page.fill("#search", wanted.prompt)
    page.page.press("#search", "Enter")
    page.page.wait_for_function("() => document.querySelectorAll('.ag-center-cols-container .ag-row').length === 4")
    page.wait_for_text(".matching", "4 samples found.")
    of_its_group = {str(index) for index, sample in samples.items() if sample.group_index == wanted.group_index}
    assert {row.get_attribute("row-id") for row in rows.all()} == of_its_group
    page.page.locator('.ag-row[row-id="5"] .ag-cell').first.click()
    page.wait("#tokens")
    assert page.page.url.endswith("/sample/5")
    assert page.text("#prompt") == wanted.prompt
    assert page.page.locator("#response").text_content() == wanted.response


def test_tokens_are_coloured_by_version_advantage_and_gap(page: WatchedPage, stored: Job) -> None:
    index, spanning = next(
        (sample.index, sample) for sample in stored_samples(stored) if len({v for v, _, _ in sample.version_spans}) > 1
    )
    page.open(f"/sample/{index}", "#tokens")
    tokens = page.page.locator("#tokens span")
    assert tokens.count() == spanning.response_length
    version, start, _ = spanning.version_spans[-1]
    assert f"policy version {version}," in (tokens.nth(start).get_attribute("title") or "")
    colours = [tokens.nth(n).evaluate("e => e.style.background") for n in (0, start)]
    assert colours[0] != colours[1], "another version has another colour"
    assert "prompts.jsonl:" in page.text("#lineage")
    assert stored.steps()[0]["branch"] in page.text("#trained"), "the optimizer step that trained it"
    page.page.get_by_label("advantage").check()
    page.page.wait_for_function(
        "old => document.querySelector('#tokens span').style.background !== old", arg=colours[0]
    )
    page.page.get_by_label("gap to the trainer").check()
    page.wait_for_text("#legend", "nats or more below")


def test_gaps_are_those_that_metrics_jsonl_has_the_mean_of(page: WatchedPage, stored: Job) -> None:
    step, location = stored.steps()[0], locate_run(stored.run)
    views = [show_sample(location, index, None) for index in step_samples(stored, step["rollout_id"])]
    gaps = [token.gap for view in views for token in view.tokens[view.prompt_length :]]
    assert None not in gaps
    mean = sum(abs(gap) for gap in gaps if gap is not None) / len(gaps)
    assert mean == pytest.approx(step["train"]["train_rollout_logprob_abs_diff"], rel=1e-5)
    page.open(f"/sample/{views[0].sample_index}", "#tokens")
    titles = [token.get_attribute("title") or "" for token in page.page.locator("#tokens span").all()]
    shown = [float(title.partition("gap ")[2].partition(",")[0]) for title in titles]
    assert shown == pytest.approx(gaps[: len(shown)], abs=1e-4)


def test_a_group_is_shown_side_by_side(page: WatchedPage, stored: Job) -> None:
    members = sorted((s for s in stored_samples(stored) if s.group_index == 1), key=lambda sample: sample.index or 0)
    page.open("/group/1", "#members")
    shown = [text.strip("\n") for text in page.texts("#members .text")]
    assert shown == [sample.response.strip("\n") for sample in members]


def test_timeline_branches_and_dead_letters_have_their_pages(page: WatchedPage, stored: Job) -> None:
    page.open("/timeline", "#timeline .main-svg")
    kinds = page.page.evaluate("() => document.querySelector('#timeline .js-plotly-plot').data.map(t => t.name)")
    assert {"generate", "wait", "train", "publish", "save"} <= set(kinds)
    page.page.get_by_role("link", name="Branches and commits").click()
    page.wait("#branches")
    assert stored.steps()[0]["branch"] in page.text("#branches")
    assert len(page.texts("#commits tbody tr")) == len(list((stored.run / "rollout").glob("committed_*.json")))
    page.page.get_by_role("link", name="Dead letters").click()
    page.page.get_by_text("No sample has failed.").wait_for()


def test_two_runs_are_compared_in_settings_and_panels(browser: Browser, stored: Job, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in stored.steps()[:2]))
    settings = json.loads((stored.run / "settings.json").read_text())
    settings["trainer"]["lr"] = 0.5
    (other / "settings.json").write_text(json.dumps(settings))
    with serve(stored.run, "--compare", str(other)) as address, watched_page(browser, address) as page:
        page.open("/compare", "#compared .main-svg")
        traces = page.page.evaluate(
            "() => document.querySelector('#compared .js-plotly-plot').data.map(t => [t.name, t.x.length])"
        )
        assert page.texts("#settings tbody td") == ["--lr", "0.001", "0.5"]
    assert ["run mean", stored.num_rollout] in traces
    assert ["other mean", 2] in traces


def test_a_report_is_one_file_that_draws_the_same_panels(browser: Browser, stored: Job, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert main(["report", str(stored.run), "--output", str(path)]) == 0
    with watched_page(browser, path.as_uri()) as page:
        page.open("", ".panel")
        page.wait_for_plots(len(SHOWN))
        check_panels(page, stored.steps())
        assert f"{stored.num_rollout} of {stored.num_rollout} rollout batches" in page.text("#words")


@pytest.mark.slow
def test_plots_follow_a_run_that_is_training(browser: Browser, tmp_path: Path) -> None:
    # With a slow reward batches come at a pace that leaves a busy machine the time to draw.
    job = Job(tmp_path, num_rollout=20, flags=STANDIN_FLAGS | {"--custom-rm-path": "tests.end_to_end.rewards.slow"})
    job.prepare()
    with job.start_with_standins() as process:
        try:
            wait_until(lambda: len(job.steps()) >= 2, process)
            with serve(job.run) as address, watched_page(browser, address) as page:
                _follow(page, job, process)
        finally:
            process.kill()


def _follow(page: WatchedPage, job: Job, process: subprocess.Popen[str]) -> None:
    """Without being loaded again, the page draws each new batch until the run has ended."""
    page.open("/", ".panel")
    page.wait_for_plots(len(SHOWN))
    page.page.get_by_text("running", exact=True).wait_for()
    page.wait_for_batches(len(page.plotted("reward")["mean"]["x"]) + 1)
    process.communicate(timeout=400)
    page.wait_for_batches(len(job.steps()))
    check_panels(page, job.steps())
    page.wait_for_text("#queue .facts", str(status(locate_run(job.run)).identity))
    page.page.get_by_text("not running", exact=True).wait_for()
