"""The training command of a bash launch script: variables and arrays are filled in, nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.errors import SettingsError
from vime.settings.script.lexer import SCRIPT_FOLDER, Statement, Word, statements

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\\(.)|\$\{([^}]*)\}|\$(\w+|[@*#?!$-])", re.DOTALL)
_BLOCK_START, _BLOCK_END = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_BLOCK_MIDDLE = {"then", "else", "elif", "do", "!", "time", "exec", "sudo", "nohup"}
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_TRAIN_SCRIPTS = {"train.py", "train_async.py"}


@dataclass(frozen=True)
class Located:
    """A word with its quotes removed and variables filled in, and where it is written."""

    text: str
    where: str


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
    return LaunchScript(reader.launch, reader.notes)


class _Reader:
    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.notes: list[str] = []
        self.launch: list[Located] | None = None
        self._values: dict[str, list[Located]] = {SCRIPT_FOLDER: [Located(str(folder), "")]}
        self._values |= {str(i): [Located(text, f"argument {i}")] for i, text in enumerate(arguments, start=1)}
        self._values["@"] = [Located(text, f"argument {i}") for i, text in enumerate(arguments, start=1)]
        self._values["*"] = self._values["@"]
        self._folder = folder
        self._in_block: dict[str, str] = {}
        self._depth = 0
        self._file = ""

    def read(self, path: Path, shown: str) -> None:
        outer, self._file = self._file, shown
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {error}.", next_step="Name a readable script.") from error
        for statement in statements(text):
            self._statement(statement)
        self._file = outer

    def _where(self, line: int) -> str:
        return f"{self._file}:{line}"

    def _note(self, line: int, words: str) -> None:
        self.notes.append(f"{self._where(line)}: {words}")

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
            self._in_block[name] = self._where(word.line)
            return
        if array is not None:
            value = [located for item in array for located in self._expand(item)]
        else:
            cut = len(word.text.partition("=")[0]) + 1
            head, *rest = word.parts
            body = Word(word.line, [type(head)(head.kind, head.text[cut:]), *rest])
            value = [Located(" ".join(part.text for part in self._expand(body, split=False)), self._where(word.line))]
        self._values[name] = [*self._values.get(name, []), *value] if append else value

    def _command(self, words: list[Word]) -> None:
        if words[0].text in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif any(Path(word.text.strip("\"'")).name in _TRAIN_SCRIPTS for word in words):
            index = next(i for i, word in enumerate(words) if Path(word.text.strip("\"'")).name in _TRAIN_SCRIPTS)
            self._launch(words[index + 1 :], words[index].line)
            if any(word.text.startswith("--runtime-env") for word in words[:index]):
                self._note(words[0].line, "the runtime environment is not taken over; see --train-env-vars.")
        elif len(words) > 1 and Path(words[0].text).name == "vime" and words[1].text == "train":
            self._launch(words[2:], words[0].line)

    def _launch(self, words: list[Word], line: int) -> None:
        if self.launch is not None:
            self._note(line, "a second training command is left out.")
            return
        if self._depth > 0:
            self._note(line, "the training command lies inside a condition or loop; its flags are taken as they are.")
        self.launch = [located for word in words for located in self._expand(word)]

    def _source(self, word: Word) -> None:
        named = " ".join(located.text for located in self._expand(word))
        path = next((path for path in (Path(named), self._folder / named) if named and path.is_file()), None)
        if path is None:
            self._note(word.line, f"{word.text} can't be read, so what it sets is missing.")
        else:
            self.read(path, str(path))

    def _expand(self, word: Word, *, split: bool = True) -> list[Located]:
        """The word's value: several words for an array or an unquoted variable with blanks, none for an empty one."""
        where = self._where(word.line)
        done: list[Located] = []
        text: str | None = None
        for part in word.parts:
            if part.kind == "variable":
                found = self._value(part.text[1:].strip("{}"), word)
                if split and not part.text.endswith("[@]}"):
                    found = [Located(piece, item.where) for item in found for piece in item.text.split()]
            elif part.kind == "double" and (name := re.fullmatch(r'"\$(?:\{(\w+\[[@*]\]|@|\*)\}|([@*]))"', part.text)):
                found = self._value(name[1] or name[2], word)
            else:
                text = (text or "") + self._literal(part.kind, part.text, word)
                continue
            if len(found) == 1:
                text = (text or "") + found[0].text
                where = found[0].where if len(word.parts) == 1 else where
            elif found:
                done += [Located((text or "") + found[0].text, found[0].where), *found[1:-1]]
                text, where = found[-1].text, found[-1].where
        return done if text is None else [*done, Located(text, where)]

    def _literal(self, kind: str, text: str, word: Word) -> str:
        if kind == "single":
            return text[1:-1]
        if kind == "escaped":
            return text[1:]
        if kind == "substitution":
            self._note(word.line, f"{text} would have to be run; it is left empty.")
            return ""
        return self._fill(text[1:-1], word) if kind == "double" else text

    def _fill(self, text: str, word: Word) -> str:
        """Text between double quotes."""

        def replace(match: re.Match[str]) -> str:
            if match[1] is not None:
                return match[1] if match[1] in '$`"\\' else "" if match[1] == "\n" else match[0]
            return " ".join(item.text for item in self._value(match[2] or match[3], word))

        if "$(" in text or "`" in text.replace("\\`", ""):
            self._note(word.line, f'"{text}" would have to be run; it is kept as written.')
            return text
        return _VARIABLE.sub(replace, text)

    def _value(self, expression: str, word: Word) -> list[Located]:
        """Value of `NAME`, `NAME[@]`, `NAME:-default` or `NAME-default`."""
        match = re.fullmatch(r"(\w+|[@*])(?:\[[@*]\])?(?::?-(.*))?", expression, re.DOTALL)
        if match is None:
            self._note(word.line, f"${{{expression}}} is more than this command can fill in; it is left empty.")
            return []
        name, default = match[1], match[2]
        if name in ("@", "*") and not self._values[name]:
            self._note(word.line, f"${name} stands for the script's own words; there are none. Give them after --.")
        if name in self._values and (default is None or any(item.text for item in self._values[name])):
            return self._values[name]
        if default is not None:
            return [Located(self._fill(default.strip("\"'"), word), self._where(word.line))]
        set_in = f" It is set inside a condition or loop at {self._in_block[name]}." if name in self._in_block else ""
        self._note(word.line, f"${name} has no value in the script; it is left empty.{set_in}")
        return []
