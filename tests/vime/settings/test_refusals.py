"""What isn't built is refused at a real start and warned about in a dry run."""

import json
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.groups import all_flags
from vime.settings.machine import has_gpus
from vime.settings.parse import parse_settings
from vime.settings.refusals import REFUSALS, refused
from vime.settings.validate import validate

DATA_PARALLEL = ("--vllm-data-parallel-size", "2")


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "p.jsonl").touch()
    return [
        "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8",
        "--rm-type", "random", "--save", "run", "--actor-num-gpus-per-node", "1",
        "--rollout-data-transport", "straw",
    ]  # fmt: skip


def test_rows_name_flags_that_exist_and_none_twice() -> None:
    names = [row.flag for row in REFUSALS]
    known = {described.name for _, described in all_flags().values()} | {"--profile", "--vllm-data-parallel-size"}
    assert set(names) <= known
    assert len(set(names)) == len(names)


def test_each_row_says_what_works_why_and_what_is_needed() -> None:
    for row in REFUSALS:
        assert row.accepted
        assert row.reason.endswith(".")
        assert row.needs


def test_no_default_is_refused() -> None:
    assert refused(parse_settings([])) == []


def test_several_refusals_come_in_one_message(argv: list[str]) -> None:
    with pytest.raises(
        SettingsError, match=r"(?s)--vllm-data-parallel-size 2 is not built yet.*--profile is not built yet"
    ) as caught:
        validate(parse_settings([*argv, "--profile", "--rollout-num-gpus-per-engine", "2", *DATA_PARALLEL]))
    assert caught.value.next_step


def test_what_happens_anyway_is_accepted(argv: list[str]) -> None:
    stream = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"
    accepted = ["--no-offload-train", "--pg-loss-type", "ppo", "--rollout-function-path", stream, "--eps-clip", "0.1"]
    assert validate(parse_settings([*argv, *accepted])) == []


def test_a_dry_run_warns_instead(argv: list[str]) -> None:
    (warning,) = validate(parse_settings([*argv, "--profile"]), dry_run=True)
    assert warning.startswith("--profile is not built yet, allowed: with --use-pytorch-profiler. Its ranges")


def test_a_dry_run_still_refuses_what_can_never_work(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match="--global-batch-size is 3"):
        validate(parse_settings([*argv, "--global-batch-size", "3"]), dry_run=True)


def test_engines_that_share_memory_with_a_trainer_are_replaced_and_outlive_their_driver() -> None:
    assert refused(parse_settings(["--use-fault-tolerance", "--rollout-session-id", "a", "--colocate"])) == []


def test_gloo_is_what_ranks_without_gpus_use_and_is_refused_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = parse_settings(["--distributed-backend", "gloo"])
    for gpus, said in ((False, []), (True, ["--distributed-backend gloo is not built yet, allowed: nccl, or gloo on"])):
        monkeypatch.setattr("vime.settings.refusals.has_gpus", lambda found=gpus: found)
        assert [row[: len(said[0])] for row in refused(asked)] == said


def test_gpus_are_told_by_their_devices(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not has_gpus(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert has_gpus(tmp_path)


def test_media_are_sent_where_nothing_is_trained(argv: list[str], tmp_path: Path) -> None:
    asked = [*argv, "--multimodal-keys", '{"image": "images"}', "--apply-chat-template"]
    said = "--multimodal-keys {'image': 'images'} is not built yet, allowed: left out, or with"
    assert [row[: len(said)] for row in refused(parse_settings(asked))] == [said]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_vision_model"}))
    assert validate(parse_settings([*asked, "--debug-rollout-only"])) == []
