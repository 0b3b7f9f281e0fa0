"""The server of `vime view`, and what tests ask of its pages in Chromium."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request

from vime.view.run_watch import RunWatch
from vime.view.server import viewer_server

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

STANDIN_FLAGS = {"--parity-probes": 0, "--custom-rm-path": "tests.end_to_end.rewards.by_index"}
"""Of a job whose engines are stand-ins: no trainer agrees with one, and all of a group get the same answer."""


@dataclass(frozen=True)
class WatchedPage:
    """A page of the viewer in Chromium."""

    page: Page
    address: str

    def open(self, path: str, ready: str) -> None:
        """Show a page, and wait until a selector has something visible."""
        self.page.goto(self.address + path)
        self.wait(ready)

    def wait_for_text(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for(state="visible", timeout=60_000)

    def wait(self, selector: str) -> None:
        self.page.locator(selector).first.wait_for(state="visible", timeout=60_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def picture(self, path: Path, folder: Path, *, selector: str = "", full_page: bool = False) -> None:
        """A picture of the page, or of one element, in which `folder` is called /runs."""
        self.wait(".heading .note")
        self.page.evaluate(
            """folder => {
                const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
                while (texts.nextNode()) {
                    texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "/runs");
                }
            }""",
            str(folder),
        )
        if selector:
            self.page.locator(selector).first.screenshot(path=path)
        else:
            self.page.screenshot(path=path, full_page=full_page)

    def plotted(self, panel: str) -> dict[str, dict[str, list[Any]]]:
        """Name of each line that Plotly draws in a panel -> its x and y."""
        found = self.page.evaluate(
            """panel => document.querySelector(`[data-panel="${panel}"] .js-plotly-plot`).data
            .map(trace => [trace.name, {x: Array.from(trace.x), y: Array.from(trace.y)}])""",
            panel,
        )
        return dict(found)

    def wait_for_batches(self, count: int) -> None:
        """Until the plot of rewards has at least so many."""
        self.page.wait_for_function(
            """count => document.querySelector('[data-panel="reward"] .js-plotly-plot').data[0].x.length >= count""",
            arg=count,
            timeout=120_000,
        )

    def wait_for_plots(self, count: int) -> None:
        """Until so many plots are drawn."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('.js-plotly-plot .main-svg').length >= count", arg=count, timeout=60_000
        )


@contextmanager
def serve(run: Path, *more: str) -> Iterator[str]:
    """The address of a server on a run."""
    command = [sys.executable, "-m", "vime", "view", str(run), "--port", "0", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0].rstrip("/")
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@contextmanager
def served(
    watches: Sequence[RunWatch], around: Callable[[WSGIApplication], WSGIApplication] = lambda app: app
) -> Iterator[str]:
    """The address of a server in this process; `around` may wrap its application."""
    server = viewer_server(watches, "127.0.0.1", 0)
    server.app = around(server.app)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def watched_page(browser: Browser, address: str) -> Iterator[WatchedPage]:
    """A page that may show no error, and ask nobody but the address."""
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"{message.type}: {message.text}")

    def ask(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            complaints.append(f"asks for {request.url}")

    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", ask)
    yield WatchedPage(page, address)
    page.close()
    assert complaints == []
