"""What isn't built is refused at a real start and warned about in a dry run."""

import json
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.groups import all_flags
from vime.settings.parse import parse_settings
from vime.settings.refusals import REFUSALS, refused
from vime.settings.validate import validate


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
    known = {described.name for _, described in all_flags().values()} | {"--router-*", "--vllm-data-parallel-size"}
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
        SettingsError, match=r"(?s)--use-distributed-post is not built yet.*--rollout-session-id x is not built yet"
    ) as caught:
        validate(parse_settings([*argv, "--rollout-session-id", "x", "--use-distributed-post"]))
    assert caught.value.next_step


def test_what_happens_anyway_is_accepted(argv: list[str]) -> None:
    stream = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"
    accepted = ["--no-offload-train", "--pg-loss-type", "ppo", "--rollout-function-path", stream, "--eps-clip", "0.1"]
    assert validate(parse_settings([*argv, *accepted])) == []


def test_a_dry_run_warns_instead(argv: list[str]) -> None:
    (warning,) = validate(parse_settings([*argv, "--use-distributed-post"]), dry_run=True)
    assert warning.startswith("--use-distributed-post is not built yet, allowed: left out. Producers send")


def test_a_secret_is_not_shown() -> None:
    shown = " ".join(refused(parse_settings(["--wandb-key", "hush"])))
    assert "--wandb-key *** is not built yet" in shown
    assert "hush" not in shown


def test_a_dry_run_still_refuses_what_can_never_work(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match="--global-batch-size is 3"):
        validate(parse_settings([*argv, "--global-batch-size", "3"]), dry_run=True)


def test_engines_that_sleep_are_not_replaced_yet() -> None:
    asked = ["--use-fault-tolerance", "--colocate"]
    assert any(row.startswith("--use-fault-tolerance is not built yet") for row in refused(parse_settings(asked)))
    kept = parse_settings([*asked, "--no-offload-rollout"])
    assert not any(row.startswith("--use-fault-tolerance") for row in refused(kept))
