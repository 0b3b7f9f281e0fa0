"""The pictures of the documents: of a run of one's own, or of the job on stand-in engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from recovery.run_location import locate_run
from tests.browser.watched_page import WatchedPage, serve, watched_page
from vime.view.panels import PANELS
from vime.view.run_watch import RunWatch
from vime.view.sample_index import Condition, SampleQuery

pytestmark = [pytest.mark.browser, pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def other(pictured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first half of the same run under another learning rate."""
    folder = tmp_path_factory.mktemp("other") / "other"
    folder.mkdir()
    lines = (pictured / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[: len(lines) // 2]))
    settings = json.loads((pictured / "settings.json").read_text())
    settings["trainer"]["lr"] /= 10
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def opened(pictured: Path, other: Path, browser: Browser) -> Iterator[WatchedPage]:
    with serve(pictured, "--compare", str(other)) as address, watched_page(browser, address) as page:
        yield page


@pytest.fixture(scope="module")
def trained(pictured: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """Samples that were trained, those with the largest gap first."""
    watch = RunWatch(locate_run(pictured), "run", tmp_path_factory.mktemp("index"))
    watch.refresh_samples()
    by_gap = SampleQuery(
        conditions=(Condition("mean_gap", "notBlank"),), order=(("mean_gap", "descending"),), limit=100_000
    )
    rows = watch.index.page(by_gap).rows
    watch.close()
    return rows


def test_the_overview_is_drawn(opened: WatchedPage, pictured: Path, pictures: Path) -> None:
    opened.open("/", ".panel")
    opened.wait_for_plots(len(PANELS))
    opened.wait("#queue .facts")
    opened.picture(pictures / "view_overview.png", pictured.parent, full_page=True)


def test_the_table_is_ordered_by_gap(
    opened: WatchedPage, pictured: Path, pictures: Path, trained: list[dict[str, int]]
) -> None:
    opened.open("/samples", ".ag-row[row-id]")
    head = opened.page.locator('.ag-header-cell[col-id="mean_gap"] .ag-header-cell-label')
    head.click()
    head.click()
    first = [row["sample_index"] for row in trained if row["mean_gap"] == trained[0]["mean_gap"]]
    opened.wait(", ".join(f'.ag-row[row-index="0"][row-id="{index}"]' for index in first))
    opened.picture(pictures / "view_samples.png", pictured.parent)


def test_a_sample_of_several_versions_is_shown(
    opened: WatchedPage, pictured: Path, pictures: Path, trained: list[dict[str, int]]
) -> None:
    chosen = next((row for row in trained if row["min_version"] != row["max_version"]), trained[0])
    opened.open(f"/sample/{chosen['sample_index']}", "#tokens")
    opened.picture(pictures / "view_sample.png", pictured.parent)


def test_the_largest_gap_is_shown_in_its_sample_and_its_group(
    opened: WatchedPage, pictured: Path, pictures: Path, trained: list[dict[str, int]]
) -> None:
    opened.open(f"/sample/{trained[0]['sample_index']}", "#tokens")
    opened.page.get_by_label("gap to the trainer").check()
    opened.wait_for_text("#legend", "nats or more below")
    opened.picture(pictures / "view_gap.png", pictured.parent, selector=".card:has(#tokens)")
    opened.page.locator(".facts a").first.click()
    opened.wait("#members")
    opened.picture(pictures / "view_group.png", pictured.parent)


@pytest.mark.parametrize(("page", "drawn"), [("timeline", "#timeline .main-svg"), ("compare", "#compared .main-svg")])
def test_timeline_and_comparison_are_drawn(
    opened: WatchedPage, pictured: Path, pictures: Path, page: str, drawn: str
) -> None:
    opened.open(f"/{page}", drawn)
    opened.picture(pictures / f"view_{page}.png", pictured.parent)
