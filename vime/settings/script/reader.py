"""The training command of a bash launch script: variables and arrays are filled in, nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.errors import SettingsError, reason_of
from vime.settings.script.lexer import Statement, Word, statements
from vime.settings.script.variables import Located, Variables

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BLOCK_START, _BLOCK_END = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_BLOCK_MIDDLE = {"then", "else", "elif", "do", "!", "time", "exec", "sudo", "nohup"}
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_TRAIN_SCRIPTS = {"train.py", "train_async.py"}


@dataclass
class LaunchScript:
    """The words after `train.py`, and what could not be taken over, each with its line."""

    words: list[Located] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_launch_script(path: Path, arguments: Sequence[str] = ()) -> LaunchScript:
    """Read a script; `arguments` stand for its `$1`, `$@`.

    Raises:
        SettingsError: it can't be read, or no command in it runs train.py or `vime train`.
    """
    reader = _Reader(path.parent, arguments)
    reader.read(path, str(path))
    if reader.launch is None:
        raise SettingsError(
            f"{path}: no command runs train.py or `vime train`.", next_step="Name the script that starts training."
        )
    return LaunchScript(reader.launch, reader.variables.notes)


class _Reader:
    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.launch: list[Located] | None = None
        self.variables = Variables(folder, arguments)
        self._folder = folder
        self._depth = 0
        self._being_read: set[Path] = set()

    def read(self, path: Path, shown: str) -> None:
        self._being_read.add(path.resolve())
        outer, self.variables.file = self.variables.file, shown
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {reason_of(error)}.", next_step="Name a readable script.") from error
        for statement in statements(text):
            self._statement(statement)
        self.variables.file = outer
        self._being_read.discard(path.resolve())

    def _statement(self, statement: Statement) -> None:
        words = list(statement.words)
        while words and words[0].text in _BLOCK_START | _BLOCK_END | _BLOCK_MIDDLE | _DECLARE:
            first = words.pop(0).text
            self._depth += (first in _BLOCK_START) - (first in _BLOCK_END)
            if first in _DECLARE:
                words = [word for word in words if not word.text.startswith("-")]
        while words and (match := _ASSIGNMENT.match(words[0].text)) is not None:
            self._assign(match[1], bool(match[2]), words.pop(0), statement.array)
        if words:
            self._command(words)

    def _assign(self, name: str, append: bool, word: Word, array: list[Word] | None) -> None:
        if self._depth > 0:
            self.variables.in_block[name] = self.variables.where(word.line)
            return
        if array is not None:
            items = self.variables.values.get(name, []) if append else []
            self.variables.values[name] = [*items, *(part for item in array for part in self.variables.expand(item))]
        else:
            cut = len(word.text.partition("=")[0]) + 1
            head, *rest = word.parts
            body = Word(word.line, [type(head)(head.kind, head.text[cut:]), *rest])
            text = " ".join(part.text for part in self.variables.expand(body, split=False))
            before = " ".join(part.text for part in self.variables.values.get(name, [])) if append else ""
            self.variables.values[name] = [Located(before + text, self.variables.where(word.line))]

    def _command(self, words: list[Word]) -> None:
        if words[0].text in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif words[0].text == "shift":
            self._shift(words)
        elif (index := _train_script(words)) is not None:
            self._launch(words[index + 1 :], words[index].line)
            if any(word.text.startswith("--runtime-env") for word in words[:index]):
                self.variables.note(words[0].line, "the runtime environment is not taken over; see --train-env-vars.")
        elif len(words) > 1 and Path(words[0].text).name == "vime" and words[1].text == "train":
            self._launch(words[2:], words[0].line)

    def _shift(self, words: list[Word]) -> None:
        count = words[1].text if len(words) > 1 else "1"
        if self._depth > 0 or not count.isdecimal():
            self.variables.note(
                words[0].line, "what is shifted here inside a condition or loop, or by a variable, stays."
            )
        else:
            self.variables.shift(int(count))

    def _launch(self, words: list[Word], line: int) -> None:
        if self.launch is not None:
            self.variables.note(line, "a second training command is left out.")
            return
        if self._depth > 0:
            self.variables.note(
                line, "the training command lies inside a condition or loop; its flags are taken as they are."
            )
        self.launch = [located for word in words for located in self.variables.expand(word)]

    def _source(self, word: Word) -> None:
        named = " ".join(located.text for located in self.variables.expand(word))
        path = next((path for path in (Path(named), self._folder / named) if named and path.is_file()), None)
        if path is not None and path.resolve() in self._being_read:
            self.variables.note(word.line, f"{word.text} sources itself; left out.")
        elif path is None:
            self.variables.note(word.line, f"{word.text} can't be read, so what it sets is missing.")
        else:
            self.read(path, str(path))


def _train_script(words: list[Word]) -> int | None:
    """Index of the script that a Python of this command runs, when it is train.py."""
    texts = [word.text.strip("\"'") for word in words]
    for index, text in enumerate(texts):
        if Path(text).name in _TRAIN_SCRIPTS:
            runs = index == 0 or any("python" in before.lower() or "torchrun" in before for before in texts[:index])
            return index if runs else None
    return None
