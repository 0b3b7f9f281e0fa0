"""Values of variables in a script, and what the words that use them become."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.settings.script.lexer import SCRIPT_FOLDER, Word

_VARIABLE = re.compile(r"\\(.)|\$\{((?:[^{}]|\{[^{}]*\})*)\}|\$(\w+|[@*#?!$-])", re.DOTALL)
_QUOTED_LIST = re.compile(r'"\$(?:\{((?:\w+\[[@*]\]|[@*])(?::\d+(?::\d+)?)?)\}|([@*]))"')
"""An array or the script's own words, or some of them, between double quotes."""
_QUOTES = re.compile(r"\"([^\"]*)\"|'([^']*)'")
_EXPRESSION = re.compile(
    r"""
      (?P<name>\w+|[@*])(?P<array>\[[@*]\])?
      (?: :?-(?P<default>.*) | (?P<when>:?\+)(?P<instead>.*) | :(?P<start>\d+)(?: :(?P<length>\d+))? )?
    """,
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Located:
    """A word with its quotes removed and variables filled in, and where it is written."""

    text: str
    where: str


class Variables:
    """Name -> value, one word for a variable and several for an array.

    `in_block` has the place of assignments inside conditions and loops, which are not followed; `file` is the script
    being read; `notes` say what could not be filled in.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.notes: list[str] = []
        self.in_block: dict[str, str] = {}
        self._noted_blocks: set[str] = set()
        self.file = ""
        words = [Located(text, f"argument {i}") for i, text in enumerate(arguments, start=1)]
        self.values: dict[str, list[Located]] = {SCRIPT_FOLDER: [Located(str(folder), "")], "@": words, "*": words}
        self.values |= {str(i): [word] for i, word in enumerate(words, start=1)}

    def shift(self, count: int) -> None:
        """Let go of the first of the script's own words; of none where there are fewer, as in bash."""
        words = self.values["@"]
        if count <= len(words):
            kept = words[count:]
            self.values |= {"@": kept, "*": kept, **{str(i): [word] for i, word in enumerate(kept, start=1)}}
            for number in range(len(kept) + 1, len(words) + 1):
                del self.values[str(number)]

    def where(self, line: int) -> str:
        return f"{self.file}:{line}"

    def note(self, line: int, words: str) -> None:
        self.notes.append(f"{self.where(line)}: {words}")

    def expand(self, word: Word, *, split: bool = True) -> list[Located]:
        """The word's value: several words for an array or an unquoted variable with blanks, none for an empty one."""
        where = self.where(word.line)
        done: list[Located] = []
        text: str | None = None
        for found in self._pieces(word, split):
            if len(found) == 1:
                text = (text or "") + found[0].text
                where = found[0].where if len(word.parts) == 1 else where
            elif found:
                done += [Located((text or "") + found[0].text, found[0].where), *found[1:-1]]
                text, where = found[-1].text, found[-1].where
        return done if text is None else [*done, Located(text, where)]

    def _pieces(self, word: Word, split: bool) -> Iterator[list[Located]]:
        """What the parts of a word stand for; the first word of each joins on to the last one of what comes before."""
        where = self.where(word.line)
        for part in word.parts:
            if part.kind == "variable":
                yield self._value(_expression(part.text), word, split=split)
            elif part.kind == "double":
                yield from self._quoted(part.text[1:-1], word)
            elif part.kind == "substitution":
                self.note(word.line, f"{part.text} would have to be run; it is left empty.")
                yield [Located("", where)]
            else:
                cut = {"single": slice(1, -1), "escaped": slice(1, None)}.get(part.kind, slice(None))
                yield [Located(part.text[cut], where)]

    def _quoted(self, text: str, word: Word) -> Iterator[list[Located]]:
        """What the pieces of a text between double quotes stand for."""
        where = self.where(word.line)
        if _would_run(text):
            self.note(word.line, f'"{text}" would have to be run; it is kept as written.')
            yield [Located(text, where)]
            return
        position = 0
        for match in _VARIABLE.finditer(text):
            if match.start() > position:
                yield [Located(text[position : match.start()], where)]
            position = match.end()
            if match[1] is not None:
                yield [Located(_unescaped(match), where)]
            else:
                yield self._quoted_value(match[3] if match[2] is None else match[2], word)
        if position < len(text) or not text:
            yield [Located(text[position:], where)]

    def _quoted_value(self, expression: str, word: Word) -> list[Located]:
        """As many words as `@` or `NAME[@]` has, one word for all else: `*` and `NAME[*]` are joined."""
        found = self._value(expression, word)
        match = _EXPRESSION.fullmatch(expression)
        if match is not None and (match["name"] == "@" or match["array"] == "[@]"):
            return found
        return [Located(" ".join(item.text for item in found), self.where(word.line))]

    def _value(self, expression: str, word: Word, *, split: bool = False) -> list[Located]:
        """Value of `NAME`, `NAME[@]`, `NAME:-default`, `NAME:+instead`, `NAME:start:length`, and the like.

        With `split`, apart at blanks, but for the words of `NAME[@]` and for what is quoted.
        """
        match = _EXPRESSION.fullmatch(expression)
        if match is None or (match["name"] in ("@", "*") and match["start"] == "0"):
            self.note(word.line, f"${{{expression}}} is more than this command can fill in; it is left empty.")
            return []
        name, default, instead = match["name"], match["default"], match["instead"]
        if instead is not None:
            value = self.values.get(name)
            is_set = value is not None if match["when"] == "+" else any(item.text for item in value or ())
            return self._alternative(instead, word, split) if is_set else []
        if name in self.values and name in self.in_block:
            self._note_block(name, word)
        if name in self.values and (default is None or any(item.text for item in self.values[name])):
            found = _slice(self.values[name], match)
            return _at_blanks(found) if split and match["array"] != "[@]" else found
        if default is not None:
            return self._alternative(default, word, split)
        set_in = f" It is set inside a condition or loop at {self.in_block[name]}." if name in self.in_block else ""
        given = " Give the script's own words after --." if name.isdigit() else ""
        self.note(word.line, f"${name} has no value in the script; it is left empty.{set_in}{given}")
        return []

    def _note_block(self, name: str, word: Word) -> None:
        """Once for each place: what a condition changes is left out."""
        place = self.in_block[name]
        if place not in self._noted_blocks:
            self._noted_blocks.add(place)
            self.note(word.line, f"${name} is changed inside a condition or loop at {place}, which is not followed.")

    def _alternative(self, text: str, word: Word, split: bool) -> list[Located]:
        """What stands after `:-` or `:+`."""
        listed = _QUOTED_LIST.fullmatch(text)
        if listed is not None:
            return self._quoted_value(listed[1] or listed[2], word)
        pieces = self._quoted(_QUOTES.sub(r"\1\2", text), word)
        filled = "".join(" ".join(item.text for item in found) for found in pieces)
        whole = [Located(filled, self.where(word.line))]
        return _at_blanks(whole) if split and not _QUOTES.fullmatch(text) else whole


def _at_blanks(items: list[Located]) -> list[Located]:
    return [Located(piece, item.where) for item in items for piece in item.text.split()]


def _would_run(quoted: str) -> bool:
    return "$(" in quoted or "`" in quoted.replace("\\`", "")


def _unescaped(match: re.Match[str]) -> str:
    """What a backslash and the character after it are between double quotes."""
    return match[1] if match[1] in '$`"\\' else "" if match[1] == "\n" else match[0]


def _expression(variable: str) -> str:
    """What stands in `${...}`, or after a bare `$`."""
    return variable[2:-1] if variable.startswith("${") else variable[1:]


def _slice(items: list[Located], match: re.Match[str]) -> list[Located]:
    """The part of an array, of the script's own words (which count from 1), or of a text that an expression names."""
    if match["start"] is None:
        return items
    own = match["name"] in ("@", "*")
    start = int(match["start"]) - own
    part = slice(start, None if match["length"] is None else start + int(match["length"]))
    if own or match["array"]:
        return items[part]
    return [Located(item.text[part], item.where) for item in items]
