"""Words and statements of a bash script, with their lines. Nothing is run.

`shlex` loses lines, ends a statement's newline with its comment, and forgets which quotes stood around a `$`, so the
few token kinds that launch scripts use are matched here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
      (?P<continued>\\\r?\n)
    | (?P<escaped>\\.)
    | (?P<single>'[^']*')
    | (?P<double>"(?:\\.|[^"\\])*")
    | (?P<substitution>\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)
    | (?P<variable>\$\{(?:[^{}"]|"[^"]*"|\{[^{}]*\})*\}|\$(?:\w+|[@*\#?!$-]))
    | (?P<redirect>(?:\d?>>?|&>>?)(?:&\d|[ \t]*[^\s;|&()]+)|<<<?-?[ \t]*\S+)
    | (?P<end>\n|;;?|&&|\|\||[|&])
    | (?P<paren>[()])
    | (?P<space>[ \t\r]+)
    | (?P<plain>[^\\'"$`;&|()<>\s]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_SCRIPT_FOLDER = re.compile(
    r"""
      \$\(\s*cd\b[^\n]*?(?:BASH_SOURCE|\$0|\$\{0\})[^\n]*?\bpwd(?:[ ]-P)?\s*\)
    | \$\(\s*dirname\b[^\n()]*?(?:BASH_SOURCE|\$0)[^\n()]*?\s*\)
    """,
    re.VERBOSE,
)
"""The usual ways to write the script's own folder."""

_BELOW = re.compile(r"""[)}]["']?((?:/[\w.-]+)+)""")
"""What such a `cd` goes to from there: /../.."""

SCRIPT_FOLDER = "__SCRIPT_FOLDER__"


@dataclass(frozen=True)
class Part:
    """A piece of a word: kind is escaped, single, double, substitution, variable or plain."""

    kind: str
    text: str


@dataclass
class Word:
    """One word as written."""

    line: int
    parts: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        """As written, quotes included."""
        return "".join(part.text for part in self.parts)


@dataclass
class Statement:
    """The words of a command, or of an assignment; `array` are the words of `NAME=( ... )`."""

    words: list[Word] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def line(self) -> int:
        return self.words[0].line


def statements(text: str) -> Iterator[Statement]:
    """The statements of a script, one after another; parentheses of subshells and functions only separate."""
    current, word, in_array = Statement(), None, False
    for kind, piece, line in _tokens(_SCRIPT_FOLDER.sub(_named_folder, text)):
        if kind in ("escaped", "single", "double", "substitution", "variable", "plain"):
            if word is None:
                word = Word(line)
                target = current.array if in_array and current.array is not None else current.words
                target.append(word)
            word.parts.append(Part(kind, piece))
            continue
        if kind in ("continued", "redirect"):
            word = None
            continue
        if piece == "(" and word is not None and re.fullmatch(r"\w+\+?=", word.text):
            current.array, in_array = [], True
        elif piece == ")" and in_array:
            in_array = False
        elif kind in ("end", "paren") and not (in_array and piece == "\n"):
            if current.words:
                yield current
            current, in_array = Statement(), False
        word = None
    if current.words:
        yield current


def _named_folder(match: re.Match[str]) -> str:
    below = _BELOW.search(match[0])
    return f"${{{SCRIPT_FOLDER}}}{below[1] if below else ''}"


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and line of each token, without comments."""
    position, line, at_word_start = 0, 1, True
    while position < len(text):
        if text[position] == "#" and at_word_start:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"no token at {text[position : position + 20]!r}")
        kind = str(match.lastgroup)
        yield kind, match[0], line
        line += match[0].count("\n")
        position = match.end()
        at_word_start = kind in ("continued", "end", "paren", "space")
