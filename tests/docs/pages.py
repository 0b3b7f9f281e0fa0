"""The written pages, and what they name: commands, flags, code spans, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("flags.md", "metrics.md", "performance.md")
PAGES = sorted(
    [
        *(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
        *(ROOT / "examples").glob("*/README.md"),
        *(ROOT / "deploy").rglob("README.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)
PROGRAMS = ("vime", "make", "bash", "python", "python3")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """One command of a page, without what stands for more words ("...")."""

    page: Path
    words: tuple[str, ...]
    is_shown: bool
    """Whether it is a line of a block, as it would be pasted, not a phrase of a sentence."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {' '.join(self.words)}"


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return [(match[1], match[2]) for match in _FENCE.finditer(text)]


def spans(text: str) -> list[str]:
    """Content of each code span outside of blocks, on one line."""
    return [" ".join(match.split()) for match in _SPAN.findall(_FENCE.sub("", text))]


def commands_of(page: Path) -> list[Command]:
    """Everything that begins with a program, and flags alone, with values, as those of `vime train`."""
    text = page.read_text()
    shown = [line for language, block in blocks(text) if language in ("", "bash") for line in _lines(block)]
    found = [Command(page, words, True) for line in shown for words in _commands_in(line)]
    return found + [Command(page, words, False) for span in spans(text) for words in _commands_in(span)]


def flags_of(page: Path) -> set[str]:
    """Every word that begins with two dashes, without its value; one that stands for several ends with a dash."""
    text = page.read_text()
    code = [*(block for _, block in blocks(text)), *spans(text)]
    return {flag for part in code for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", part)}


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures that are files, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


def _lines(block: str) -> Iterator[str]:
    lines = block.replace("\\\n", " ").splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    is_flags = lines[0].lstrip().startswith("--")
    for line in lines:
        if (has_prompts and not line.startswith("$ ")) or (line.startswith("--") and not is_flags):
            continue
        yield line.removeprefix("$ ").strip()


def _commands_in(line: str) -> Iterator[tuple[str, ...]]:
    first = line.partition(" ")[0]
    if "…" in line or not (first in PROGRAMS or first.startswith("--")):
        return
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in ("&&", ";", "|"):
            if words and (words[0] in PROGRAMS or words[0].startswith("--")):
                yield tuple(word for word in words if word != "..." and not word.startswith("$"))
            words = []
        else:
            words.append(word)
