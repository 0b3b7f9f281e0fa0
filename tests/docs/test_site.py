"""The site of the pages is built without a complaint, and needs no network to be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_the_site_and_in_its_menu(site: Path) -> None:
    front = (site / "index.html").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        place = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / place).is_file(), place
        assert f'href="{place}"' in front, place


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert fetched
        assert [place for place in fetched if re.match(r"(https?:)?//", place)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import\s+['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_tables_lists_and_pictures_of_the_pages_are_rendered(site: Path) -> None:
    concepts = (site / "concepts.html").read_text()
    assert "<th>effect</th>" in concepts
    assert concepts.count("<li><strong>") == 8
    assert 'src="images/stream.svg"' in concepts
    assert (site / "images" / "stream.svg").is_file()
