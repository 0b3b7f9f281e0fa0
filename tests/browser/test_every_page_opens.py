"""Every page of a small stopped run, in Chromium where there is one. Quick: the run is made without a job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from recovery.run_location import locate_run
from tests.browser.watched_page import WatchedPage, served, watched_page
from tests.support.eventful_run import make_run
from tests.support.step_records import step_record, write_metrics
from tests.vime.view.test_sample_index import row
from vime.view.panels import PANELS
from vime.view.run_watch import RunWatch
from vime.view.sample_index import SampleQuery

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def watch(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunWatch]:
    """Read once; without a browser it isn't made."""
    del chromium
    folder = tmp_path_factory.mktemp("every")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = make_run(folder / "run", monkeypatch)
    write_metrics(run / "metrics.jsonl", [step_record(n, generated=23) for n in (0, 1, 2, 2)])
    watch = RunWatch(locate_run(run), "run", folder)
    watch.refresh_metrics()
    watch.refresh_queue()
    watch.refresh_samples()
    yield watch
    watch.close()


@pytest.fixture(scope="module")
def opened(watch: RunWatch, browser: Browser) -> Iterator[WatchedPage]:
    """It fails the last test when the console has shown an error on any page."""
    with served([watch]) as address, watched_page(browser, address) as page:
        yield page


def test_the_first_page_draws_every_panel_with_its_numbers(opened: WatchedPage, watch: RunWatch) -> None:
    opened.open("/", ".panel")
    opened.wait_for_plots(len(PANELS))
    assert opened.plotted("loss")["loss"]["y"] == [step.train["loss"] for step in watch.state.metrics.steps]
    assert "reward_raised" in opened.text("#alarms")


def test_a_row_of_the_table_that_grows_leads_to_its_sample_and_on_to_its_group(
    opened: WatchedPage, watch: RunWatch
) -> None:
    newest = watch.index.page(SampleQuery(limit=1)).rows[0]["sample_index"]
    opened.open("/samples", ".ag-row[row-id]")
    opened.wait_for_text(".matching", f"{len(watch.index)} samples found.")
    watch.index.add([row(9999)])
    os.utime(watch.location.pool / "vime" / "queue.json")
    watch.refresh_samples()
    opened.wait('.ag-row[row-id="9999"]')
    opened.wait_for_text(".matching", f"{len(watch.index)} samples found.")
    opened.page.locator(f'.ag-row[row-id="{newest}"] .ag-cell').first.click()
    opened.wait("#tokens")
    opened.page.get_by_label("gap to the trainer").check()
    opened.wait_for_text("#legend", "nats or more below")
    opened.page.locator(".facts a").first.click()
    opened.wait("#members")


@pytest.mark.parametrize(
    ("link", "selector", "text"),
    [
        ("Timeline", "#timeline .main-svg", ""),
        ("Dead letters", "#reasons", "reward_raised"),
        ("Branches and commits", "#branches", "the beginning"),
    ],
)
def test_the_other_pages_are_a_click_away(opened: WatchedPage, link: str, selector: str, text: str) -> None:
    opened.page.get_by_role("link", name=link).click()
    opened.wait_for_text(selector, text)
