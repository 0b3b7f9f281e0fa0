"""What a start refuses in its first second, before it writes or starts anything."""

import asyncio
import dataclasses
import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.preview import rehearsal, token_room
from pipeline.preview.folders import written_places
from pipeline.preview.start_checks import check_start, first_room, reward_warnings, room_problem, room_warnings
from pipeline.progress import ProgressView
from pipeline.prompt_source import build_prompt_source
from pipeline.run import _remove_leftovers, run_training
from pipeline.run_folder import RunFolder
from tests.pipeline.preview.planned import settings_of, write_job
from tests.support.tiny_models import build_tokenizer
from vime.cli.main import main
from vime.errors import EngineStartError, ModelError, SettingsError, VimeError
from vime.rollout.model_url import get_model_url
from vime.settings.groups import Settings
from vime.settings.resolve import resolve
from vime.utils.types import Sample

HERE = __name__


async def raises(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    raise KeyError("no such label")


async def raises_on_the_first(args: Any, sample: Sample) -> float:  # noqa: ARG001
    if sample.label == "answer 0":
        raise KeyError("no such label")
    return 1.0


async def waits(args: Any, sample: Sample) -> float:  # noqa: ARG001
    while True:
        await asyncio.sleep(60)


async def asks_the_policy(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return float(len(get_model_url(args, "default")))


async def ranks_a_whole_group(args: Any, samples: list[Sample]) -> list[float]:  # noqa: ARG001
    if len({sample.index for sample in samples}) != 8:
        raise ValueError("a group of eight is expected")
    return [0.0] * 8


async def prefers_short_ones(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return 1.0 / sample.response_length


def check(folder: Path, *more: str) -> None:
    settings = settings_of(folder, *more)
    check_start(settings, build_prompt_source(settings), RunFolder.of(settings))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield server.getsockname()[1]


def test_what_can_start_is_let_through(tmp_path: Path) -> None:
    check(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_taken_router_port_is_refused_with_its_flag(tmp_path: Path, taken_port: int) -> None:
    with pytest.raises(EngineStartError, match=f"--vllm-router-port {taken_port}: .*Address already in use") as caught:
        check(tmp_path, "--vllm-router-port", str(taken_port))
    assert "leave the flag out: the system then chooses a free one" in caught.value.next_step
    check(tmp_path, "--vllm-router-port", str(taken_port), "--vllm-router-ip", "10.0.0.1")


def test_a_dry_run_tells_of_a_taken_router_port(
    tmp_path: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rollout-num-gpus", "1", "--vllm-router-port", str(taken_port)]
    settings = settings_of(tmp_path)
    named = ["--hf-checkpoint", str(settings.checkpoint.hf_checkpoint), "--prompt-data", str(settings.data.prompt_data)]
    sized = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rm-type", "random"]
    run = ["--save", str(tmp_path / "run"), "--rollout-max-response-len", "8", "--rollout-data-transport", "straw"]
    main(["train", "--dry-run", *named, *sized, *run, *words])
    assert f"- --vllm-router-port {taken_port}: A server can't listen on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("--save", "/proc/nope/run"),
        ("--rollout-data-dir", "/proc/nope/run"),
        ("--save-hf", "/proc/nope/hf_{rollout_id}"),
        ("--dump-details", "/proc/nope/details"),
        ("--wandb-dir", "/proc/nope"),
        ("--save-debug-rollout-data", "/proc/nope/{rollout_id}.pt"),
    ],
)
def test_a_folder_that_takes_no_files_is_refused_with_its_flag(tmp_path: Path, flag: str, path: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag} /proc/nope.*: nothing can be written there: .*kernel") as caught:
        check(tmp_path, flag, path)
    assert f"Name another folder with {flag}" in caught.value.next_step


def test_a_dry_run_and_a_start_say_the_same_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        check(tmp_path, "--save", "/proc/nope/run")
    flags = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "prompts.jsonl"), "--rm-type", "random"]
    sizes = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    rest = ["--rollout-max-response-len", "8", "--rollout-data-transport", "straw", "--assume-gpus", "8"]
    assert main(["train", "--dry-run", *flags, *sizes, *rest, "--save", "/proc/nope/run"]) == 1
    assert caught.value.message in capsys.readouterr().out


def test_placeholders_and_file_names_are_no_part_of_the_folder(tmp_path: Path) -> None:
    places = written_places(
        settings_of(
            tmp_path, "--save-hf", "/a/hf_{rollout_id}", "--save-debug-rollout-data", "/b/{rollout_id}/x.pt",
            "--wandb-dir", "/c/w",
        )
    )  # fmt: skip
    found = {flag: str(place) for flag, place in places.items() if flag != "--save"}
    assert found == {"--save-hf": "/a", "--save-debug-rollout-data": "/b", "--wandb-dir": "/c/w"}


def warned(folder: Path, *more: str) -> list[str]:
    settings = settings_of(folder, *more)
    return reward_warnings(settings, build_prompt_source(settings))


def test_a_reward_that_fails_on_each_first_record_is_warned_of(tmp_path: Path) -> None:
    [words] = warned(tmp_path, "--custom-rm-path", f"{HERE}.raises")
    assert re.search(r"prompts.jsonl:1, with its label .* raised KeyError", words)
    check(tmp_path, "--custom-rm-path", f"{HERE}.raises")


def test_a_reward_says_nothing_where_only_one_record_fails_or_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warned(tmp_path, "--custom-rm-path", f"{HERE}.raises_on_the_first") == []
    monkeypatch.setattr(rehearsal, "TRIAL_S", 0.1)
    assert warned(tmp_path, "--custom-rm-path", f"{HERE}.waits") == []


def test_a_reward_is_not_tried_where_a_label_is_no_response(tmp_path: Path) -> None:
    failing = ["--custom-rm-path", f"{HERE}.raises"]
    assert warned(tmp_path, *failing, "--custom-generate-function-path", "own.generate") == []
    assert warned(tmp_path, *failing, "--rollout-function-path", "own.rollout") == []
    settings = settings_of(tmp_path, *failing)
    unlabelled = dataclasses.replace(settings, data=dataclasses.replace(settings.data, label_key=None))
    assert reward_warnings(unlabelled, build_prompt_source(unlabelled)) == []
    assert warned(tmp_path, "--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9") == []


def test_a_reward_that_asks_an_engine_of_the_run_is_not_judged(tmp_path: Path) -> None:
    assert warned(tmp_path, "--custom-rm-path", f"{HERE}.asks_the_policy") == []
    config = tmp_path / "engines.yaml"
    groups = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    models = f"{{name: actor, {groups}}}, {{name: judge, update_weights: false, {groups}}}"
    config.write_text(f"vllm: [{models}]")
    served = ["--vllm-config", str(config), "--rollout-num-gpus", "2"]
    assert warned(tmp_path, "--custom-rm-path", f"{HERE}.raises", *served) == []


def test_a_reward_of_groups_is_tried_with_as_many_samples_as_a_group_has(tmp_path: Path) -> None:
    assert warned(tmp_path, "--group-rm", "--custom-rm-path", f"{HERE}.ranks_a_whole_group") == []


def test_a_reward_may_divide_by_the_length_of_the_response(tmp_path: Path) -> None:
    assert warned(tmp_path, "--custom-rm-path", f"{HERE}.prefers_short_ones") == []


def test_a_start_makes_the_checks_before_it_writes(tmp_path: Path, taken_port: int) -> None:
    words = [*write_job(tmp_path), "--vllm-router-port", str(taken_port)]
    with ProgressView() as view, pytest.raises(EngineStartError, match="Address already in use"):
        run_training(resolve(words), view)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_a_damaged_record_of_the_session_before_keeps_no_run_from_starting(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    folder.processes.write_bytes(content)
    _remove_leftovers(folder)
    assert f"{folder.processes} can't be read, so nothing of the session before is removed" in caplog.text


def test_several_faults_are_told_together(tmp_path: Path, taken_port: int) -> None:
    settings = with_tokenizer(tmp_path, "--max-tokens-per-gpu", "10", "--vllm-router-port", str(taken_port))
    with pytest.raises(VimeError, match="2 things keep the run from starting") as caught:
        check_start(settings, build_prompt_source(settings), RunFolder.of(settings))
    assert "1. --vllm-router-port" in caught.value.message
    assert "2. The first prompts have 10 tokens" in caught.value.message


def with_tokenizer(folder: Path, *more: str) -> Settings:
    """A job whose prompts, `question 0` and so on, have as many tokens as letters: 10."""
    settings = settings_of(folder, "--use-dynamic-batch-size", "--rollout-max-response-len", "6", *more)
    build_tokenizer(folder)
    return settings


def test_a_limit_that_leaves_no_room_beside_the_prompts_is_refused(tmp_path: Path) -> None:
    settings = with_tokenizer(tmp_path, "--max-tokens-per-gpu", "10")
    with pytest.raises(SettingsError, match=r"The first prompts have 10 tokens, .* allows 10 together") as caught:
        check_start(settings, build_prompt_source(settings), RunFolder.of(settings))
    assert caught.value.next_step.startswith("Raise --max-tokens-per-gpu")


def test_a_limit_that_a_long_answer_may_pass_is_warned_of(tmp_path: Path) -> None:
    for limit, num_warnings in ((11, 1), (15, 1), (16, 0)):
        settings = with_tokenizer(tmp_path, "--max-tokens-per-gpu", str(limit))
        room = first_room(settings, build_prompt_source(settings))
        assert room_problem(room) is None
        assert len(room_warnings(room)) == num_warnings
    split = with_tokenizer(tmp_path, "--max-tokens-per-gpu", "8", "--context-parallel-size", "2")
    assert room_warnings(first_room(split, build_prompt_source(split))) == []


def test_tokens_are_not_counted_where_they_do_not_matter(tmp_path: Path) -> None:
    for flags in (["--max-tokens-per-gpu", "4", "--apply-chat-template"], ["--micro-batch-size", "1"]):
        settings = with_tokenizer(tmp_path, *flags)
        assert first_room(settings, build_prompt_source(settings)) is None


def test_a_damaged_tokenizer_is_named_by_a_start_and_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = with_tokenizer(tmp_path, "--max-tokens-per-gpu", "10")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read: EOF while parsing") as caught:
        check_start(settings, build_prompt_source(settings), RunFolder.of(settings))
    assert "Restore the tokenizer's files" in caught.value.next_step
    words = [*write_job(tmp_path), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1010", "--assume-gpus", "8"]
    assert main(["train", "--dry-run", *words]) == 1
    assert "tokenizer.json can't be read" in capsys.readouterr().out


def test_a_dry_run_counts_once_and_tells_of_the_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(tmp_path)
    counted = counted_texts(monkeypatch)
    limit = ["--use-dynamic-batch-size", "--rollout-max-response-len", "6", "--assume-gpus", "8"]
    words = ["train", "--dry-run", *write_job(tmp_path), *limit, "--max-tokens-per-gpu"]
    assert main([*words, "12"]) == 0
    assert "a sample that needs more stops the run" in capsys.readouterr().out
    assert counted == ["question 0", "question 1", "question 2"]
    assert main([*words, "8"]) == 1
    assert "- The first prompts have 10 tokens" in capsys.readouterr().out


def counted_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts whose tokens are counted from now on."""
    counted: list[str] = []
    count = token_room._counts

    def counting(checkpoint: Path, texts: Sequence[str]) -> list[int]:
        counted.extend(texts)
        return count(checkpoint, texts)

    monkeypatch.setattr(token_room, "_counts", counting)
    return counted


def test_a_start_counts_once_and_warns_of_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_tokenizer(tmp_path)
    counted = counted_texts(monkeypatch)

    def begin(*_start: Any) -> list[str]:
        raise SettingsError("far enough")

    monkeypatch.setattr("pipeline.run.resume_words", begin)
    words = [*write_job(tmp_path), "--use-dynamic-batch-size", "--rollout-max-response-len", "6"]
    with ProgressView() as view, pytest.raises(SettingsError, match="far enough"):
        run_training(resolve([*words, "--max-tokens-per-gpu", "12"]), view)
    assert "warning: The first prompts have 10 tokens" in "".join(capsys.readouterr())
    assert counted == ["question 0", "question 1", "question 2"]


def test_a_run_that_is_live_is_left_to_the_lock(tmp_path: Path, taken_port: int) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    descriptor = os.open(folder.session_lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    check(tmp_path, "--vllm-router-port", str(taken_port))
    os.close(descriptor)
    with pytest.raises(EngineStartError):
        check(tmp_path, "--vllm-router-port", str(taken_port))
