"""A run to look at, the server of `vime view` on it, and a page in Chromium that must not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.watched_page import STANDIN_FLAGS, WatchedPage, serve, watched_page
from tests.end_to_end.jobs import Job, run_with_standins

REQUIRED = "VIME_REQUIRE_BROWSER"
"""Set by `make test-browser`, where a machine without Chromium is a failure."""
SCREENSHOTS = "VIME_SCREENSHOTS"
"""Folder for the pictures of the documents; temporary when left out."""
PICTURED = "VIME_PICTURED_RUN"
"""A run that has ended, for the pictures; the job on stand-in engines when left out."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the program."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        words = f"none of {', '.join(BROWSERS)} is on the PATH; on Debian: apt-get install chromium fonts-dejavu-core"
        (pytest.fail if REQUIRED in os.environ else pytest.skip)(words)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Not for longer than a module: as long as Playwright works, its loop is the thread's and no other can run."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def stored(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A short job that has ended: real but for its engines. Without a browser it isn't run."""
    del chromium
    job = Job(tmp_path_factory.mktemp("stored"), num_rollout=6, flags=STANDIN_FLAGS)
    job.prepare()
    run_with_standins(job)
    return job


@pytest.fixture(scope="session")
def address(stored: Job) -> Iterator[str]:
    """Where the stored run is shown."""
    with serve(stored.run) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[WatchedPage]:
    """A page that fails its test when the console shows an error or anything but the server is asked."""
    with watched_page(browser, address) as page:
        yield page


@pytest.fixture(scope="session")
def pictured(request: pytest.FixtureRequest) -> Path:
    """The run that the pictures are of."""
    given = os.environ.get(PICTURED)
    if given:
        return Path(given).resolve()
    stored: Job = request.getfixturevalue("stored")
    return stored.run


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
