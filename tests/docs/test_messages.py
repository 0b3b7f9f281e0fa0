"""The words that docs/troubleshooting.md finds a symptom by are words that vime prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, blocks, spans

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    *(line for language, block in blocks(PAGE) if language == "" for line in block.splitlines() if "…" in line),
    *(span for span in spans(PAGE) if "…" in span and span != "…"),
]


def texts(tree: ast.Module) -> Iterator[str]:
    """Every text of a module; where an f-string has a value there is a line break."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def printed() -> str:
    files = [path for top in ("vime", "pipeline", "recovery", "storage") for path in (ROOT / top).rglob("*.py")]
    return "\n".join(text for path in files for text in texts(ast.parse(path.read_text())))


def test_the_words_of_every_symptom_are_printed_by_the_code(printed: str) -> None:
    for message in MESSAGES:
        pieces = [piece.strip() for piece in re.split(r"…|[,:;] ", message)]
        assert [piece for piece in pieces if piece not in printed] == [], message
        assert max(map(len, pieces)) >= len("no key"), message


def test_there_are_symptoms_for_every_kind_of_end() -> None:
    assert len(MESSAGES) > 50
    assert all(f"Status {status}" in PAGE for status in (3, 4, 5))
