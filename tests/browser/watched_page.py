"""What tests ask of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page


@dataclass(frozen=True)
class WatchedPage:
    """A page of the viewer in Chromium."""

    page: Page
    address: str

    def open(self, path: str, ready: str) -> None:
        """Show a page, and wait until a selector has something visible."""
        self.page.goto(self.address + path)
        self.wait(ready)

    def wait(self, selector: str) -> None:
        self.page.locator(selector).first.wait_for(state="visible", timeout=60_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def plotted(self, panel: str) -> dict[str, dict[str, list[Any]]]:
        """Name of each line that Plotly draws in a panel -> its x and y."""
        found = self.page.evaluate(
            """panel => document.querySelector(`[data-panel="${panel}"] .js-plotly-plot`).data
            .map(trace => [trace.name, {x: Array.from(trace.x), y: Array.from(trace.y)}])""",
            panel,
        )
        return dict(found)

    def wait_for_plots(self, count: int) -> None:
        """Until so many plots are drawn."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('.js-plotly-plot .main-svg').length >= count", arg=count, timeout=60_000
        )
