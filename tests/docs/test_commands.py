"""Commands and flags of the pages are those that there are; those that read a stored run are run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Command, commands_of, flags_of, links_of
from tests.support.eventful_run import copy_run, make_run
from vime.backends.vllm_utils.arguments import VLLM_FLAGS_FILE
from vime.cli.main import main
from vime.cli.passed_on import passed_on_problems
from vime.settings.passed_on import listed_megatron_flags, own_flag_names
from vime.settings.resolve import resolve

COMMANDS = [command for page in PAGES for command in commands_of(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


STANDS_FOR = {"N": "1", "ID": "1", "FORMAT": "hf", "ROLLOUT": "1"}
"""Placeholders whose option takes a number or one of some words."""
OF_OTHERS = {
    "docs/juicefs.md": {
        "--writeback", "--open-cache", "--readdir-cache", "--attr-cache", "--entry-cache", "--dir-entry-cache",
        "--negative-entry-cache", "--heartbeat", "--trash-days", "--backup-meta", "--cache-dir", "--cache-size",
        "--io-retries", "--mount", "--bucket", "--meta-url", "--durability",
    },
    "docs/placement.md": {"--head", "--address", "--resources"},
    "docs/engines.md": {"--policy"},
    "docs/metrics_out.md": {"--logdir"},
    "docs/migration.md": {"--sglang-mem-fraction-static", "--sglang-context-length"},
    "deploy/juicefs/README.md": {"--cap-add", "--device"},
    "CONTRIBUTING.md": {"--strict"},
}  # fmt: skip
"""Page -> flags of programs other than vime, its scripts, vLLM and Megatron."""


class Parsed(BaseException):
    """A command line was read without a complaint."""


def job_words(command: Command) -> list[str]:
    """Flags of a job, with placeholders filled in; none for other commands, and where a sentence leaves values open."""
    words = [STANDS_FOR.get(word, word) for word in command.words]
    if words[0].startswith("--"):
        is_open = any(word.isupper() or "package.module" in word or ":PORT" in word for word in words)
        is_own = command.is_shown or words[0] in own_flag_names()
        return words if len(words) > 1 and is_own and (command.is_shown or not is_open) else []
    if words[0] in ("python", "python3") and words[1:2] == ["train.py"]:
        return words[2:]
    if words[0] != "vime" or words[1:2] not in (["train"], ["doctor"], ["parity"]) or words[-1] == "--config":
        return []
    for own in {"--storage", "--peer"} & set(words):  # of the doctor alone
        del words[words.index(own) : words.index(own) + 2]
    return words[2:]


def is_whole(command: Command) -> bool:
    """Whether it has the run, or whatever its command is about, so that its own parser can be asked."""
    if command.words[0] != "vime" or command.words[1:2] in ((), ("train",), ("doctor",), ("parity",)):
        return False
    plain = [word for word in command.words[1:] if not word.startswith("-")]
    return command.is_shown or len(plain) > (2 if plain[:1] in (["queue"], ["sample"]) else 1)


READERS = [
    command
    for command in COMMANDS
    if command.is_shown
    and is_whole(command)
    and command.words[1] in ("queue", "sample", "audit", "runs", "report")
    and "--help" not in command.words
]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_flags_of_a_job_are_parsed_with_their_values(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run.toml", "changed.toml"):
        (tmp_path / name).write_text("[data]\nrollout_batch_size = 4\n")
    monkeypatch.chdir(tmp_path)
    for command in (command for command in COMMANDS if command.page == page):
        words = job_words(command)
        if not any(word.startswith("--help") for word in words):
            settings = resolve(words).settings
            assert list(passed_on_problems(settings)) == [], command


def test_other_commands_are_parsed_by_their_own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser: argparse.ArgumentParser, *words: Any) -> argparse.Namespace:
        parse(parser, *words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    parsed = 0
    for command in filter(is_whole, COMMANDS):
        words = [STANDS_FOR.get(word, word) for word in command.words[1:]]
        if {"--help", "--version"} & set(words):
            continue
        try:
            assert main(words) == "parsed", command
        except Parsed:
            parsed += 1
    assert parsed > 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_run(tmp_path_factory.mktemp("made") / "run", monkeypatch)


@pytest.mark.parametrize("page", sorted({command.page for command in READERS}), ids=name_of)
def test_commands_that_look_into_a_run_work_on_a_stored_one(
    page: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, command in enumerate(command for command in READERS if command.page == page):
        words = list(command.words[1:])
        words[2 if words[0] in ("queue", "sample") else 1] = str(copy_run(made, tmp_path / str(number)))
        if words[1] in ("requeue", "drop") and "--yes" not in words:
            words.append("--yes")
        assert main(words) == 0, f"{command}: {capsys.readouterr().err}"
        assert capsys.readouterr().out.strip(), command


def test_every_command_of_vime_that_a_page_names_exists() -> None:
    usage = (ROOT / "vime" / "cli" / "main.py").read_text()
    named = {command.words[1] for command in COMMANDS if command.words[0] == "vime" and len(command.words) > 1}
    assert len(named) > 10
    names = [word for word in named if not word.startswith("-") and not word.isupper()]
    assert [name for name in names if f'        "{name}": _' not in usage] == []


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        word
        for command in COMMANDS
        if command.words[0] == "make"
        for word in command.words[1:]
        if "=" not in word and not word.isupper()
    }
    assert {"demo", "test", "docs-site"} <= named
    assert sorted(named - set(targets)) == []


def test_every_script_and_module_that_a_command_starts_exists() -> None:
    missing = []
    for command in COMMANDS:
        words = list(command.words)
        if words[0] not in ("bash", "python", "python3") or len(words) == 1:
            continue
        if words[1] == "-m":
            top = words[2].partition(".")[0]
            if top in ("benchmarks", "deploy", "examples") and "NAME" not in words[2]:
                missing += [] if importlib.util.find_spec(words[2]) else [str(command)]
            missing += [str(command) for word in words[3:] if word.startswith("tests/") and not (ROOT / word).exists()]
        elif words[1].endswith((".py", ".sh")) and not words[1].partition("/")[0].isupper():
            missing += [] if (ROOT / words[1]).is_file() else [str(command)]
    assert missing == []


def known_flags() -> set[str]:
    cli = "".join(path.read_text() for path in (ROOT / "vime" / "cli").glob("*.py"))
    benchmarks = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    packing = "".join(path.read_text() for path in (ROOT / "deploy").rglob("*.*") if path.suffix in (".py", ".sh"))
    own = set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", cli + benchmarks + packing))
    own |= set(re.findall(r"add_argument\(\s*[\"'](--[a-z][\w-]*)", (ROOT / "examples/reverse/prepare.py").read_text()))
    return own | own_flag_names() | listed_megatron_flags() | {"--help", "--version", "--output", "--seed"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_that_a_page_names_exists(page: Path) -> None:
    listed = json.loads((ROOT / "vime" / "backends" / "vllm_utils" / VLLM_FLAGS_FILE).read_text())["options"]
    engine = {option.removeprefix("--") for option in listed}
    known = known_flags() | OF_OTHERS.get(name_of(page), set())

    def exists(flag: str) -> bool:
        name = flag.removeprefix("--")
        if name in ("vllm-", "router-") or name.startswith("router-"):  # the router's own parser sees those of commands
            return True
        if flag.endswith("-"):
            return any(other.startswith(flag) for other in known)
        plain = name.removeprefix("vllm-").removeprefix("no-")
        return flag in known or plain in engine or f"no-{plain}" in engine

    assert sorted(flag for flag in flags_of(page) if not exists(flag)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_links_exists(page: Path) -> None:
    assert [link for link in links_of(page) if not (page.parent / link).exists()] == []
