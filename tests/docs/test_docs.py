"""The documents name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))


def test_every_test_that_a_document_names_exists() -> None:
    named = [match for path in DOCS for match in re.findall(r"`(tests/\S+\.py)::(\w+)`", path.read_text())]
    assert len(named) > 10
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_every_name_of_the_glossary_is_in_its_file() -> None:
    named = re.findall(r"`([\w/]+\.py): (\w+)`", (ROOT / "docs" / "glossary.md").read_text())
    assert len(named) > 40
    missing = [f"{file}: {name}" for file, name in named if not re.search(rf"\b{name}\b", (ROOT / file).read_text())]
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    words = re.findall(
        r"`((?:vime|storage|recovery|pipeline|tests|scripts|benchmarks|deploy)/[\w/.-]+\.\w+)", path.read_text()
    )
    in_pool = {"vime/queue.json", "vime/trained.jsonl", "vime/pool.json"}
    assert [word for word in words if word not in in_pool and not (ROOT / word).exists()] == []
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
