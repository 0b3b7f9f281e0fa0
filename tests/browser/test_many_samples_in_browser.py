"""A hundred thousand samples are searched, filtered and ordered from the page without lag."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser

from recovery.run_location import locate_run
from tests.browser.watched_page import served, watched_page
from tests.vime.view.test_sample_index import SERVER_TIME_S, row
from vime.view.run_watch import RunWatch

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

NUM_SAMPLES = 100_000
WORDS = ("seven", "times", "eleven", "is", "carry", "the", "one", "so", "therefore", "answer")


class Timed:
    """An application that notes the processor time of each answer to the page."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self.took_s: list[float] = []

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        began = time.thread_time()
        answer = list(self._app(environ, start_response))
        if environ["PATH_INFO"] == "/_dash-update-component":
            self.took_s.append(time.thread_time() - began)
        return answer


@pytest.fixture
def watch(tmp_path: Path) -> Any:
    """A run whose index is full; nothing else of it is there."""
    (tmp_path / "settings.json").write_text("{}")
    watch = RunWatch(locate_run(tmp_path, needs_queue=False), "run", tmp_path)
    chance = random.Random(0)
    for first in range(0, NUM_SAMPLES, 10_000):
        watch.index.add(
            row(number, reward=float(number % 10), response=f"{' '.join(chance.choices(WORDS, k=12))} {number}.")
            for number in range(first, first + 10_000)
        )
    yield watch
    watch.close()


def test_search_filter_and_order_take_the_server_less_than_300_ms(browser: Browser, watch: RunWatch) -> None:
    timed: list[Timed] = []

    def around(app: WSGIApplication) -> WSGIApplication:
        timed.append(Timed(app))
        return timed[0]

    with served([watch], around) as address, watched_page(browser, address) as page:
        page.open("/samples", ".ag-row[row-id]")
        page.wait_for_text(".matching", "100,000 samples found.")
        page.page.locator('.ag-header-cell[col-id="reward"] .ag-header-cell-label').click()
        page.wait('.ag-row[row-index="0"][row-id$="0"]')
        page.page.locator('.ag-header-cell[col-id="reward"] .ag-header-cell-filter-button').click()
        page.page.locator(".ag-filter input[type=number]").first.fill("7")
        page.wait_for_text(".matching", "10,000 samples found.")
        page.page.keyboard.press("Escape")
        page.page.fill("#search", "therefore the answer is")
        page.page.press("#search", "Enter")
        page.page.wait_for_function(
            "() => { const words = document.querySelector('.matching')?.textContent || '';"
            " return words.includes('found') && !words.startsWith('10'); }"
        )
        assert 0 < int(page.text(".matching").split()[0].replace(",", "")) < NUM_SAMPLES / 50
    slowest = max(timed[0].took_s)
    print(f"slowest of {len(timed[0].took_s)} answers: {1000 * slowest:.0f} ms")
    assert len(timed[0].took_s) >= 5
    assert slowest < SERVER_TIME_S
