"""Command line to settings, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs, parse_settings
from vime.settings.record import settings_record
from vime.settings.resolve import resolve
from vime.settings.validate import validate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "p.jsonl").touch()
    return tmp_path


def words(model: Path, *more: str) -> list[str]:
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(model / "p.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8",
        "--rm-type", "random", "--save", "run",
        "--rollout-data-transport", "straw", "--actor-num-gpus-per-node", "1", *more,
    ]  # fmt: skip


def checked(model: Path, *more: str) -> Settings:
    settings = parse_settings(words(model, *more))
    validate(settings)
    return settings


def test_documented_flags_reach_their_groups(model: Path) -> None:
    settings = checked(
        model,
        "--lr",
        "5e-4",
        "--eps-clip-high",
        "0.28",
        "--flush-cache-interval",
        "-1",
        "--disable-grpo-std-normalization",
    )
    assert settings.trainer.lr == 5e-4
    assert settings.objective.eps_clip_high == 0.28
    assert settings.weights.flush_cache_interval == -1
    assert settings.objective.grpo_std_normalization is False
    assert settings.data.samples_per_step == 8


def test_number_of_steps_tells_the_samples_of_one(model: Path) -> None:
    settings = checked(model, "--num-steps-per-rollout", "4")
    assert settings.data.samples_per_step * 4 == settings.data.samples_per_rollout
    assert settings.data.steps_per_rollout == 4


def test_flags_of_vllm_and_megatron_are_passed_on_with_their_values(model: Path) -> None:
    settings = checked(
        model, "--vllm-max-model-len", "64", "--tensor-model-parallel-size", "1", "--lr-decay-style", "cosine"
    )
    assert settings.vllm_args == ("--vllm-max-model-len", "64")
    assert settings.megatron_args == ("--tensor-model-parallel-size", "1", "--lr-decay-style", "cosine")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--advantage-estimator", "nope"], "invalid choice"),
        (["--lr", "fast"], "invalid float value"),
        (["--eps-clip", "-1"], "--eps-clip is -1.0, allowed: 0 or more"),
        (["--rollout-temperature", "0"], "--rollout-temperature is 0.0, allowed: more than 0"),
        (["--global-batch-size", "3"], "--global-batch-size is 3"),
        (["--use-dynamic-batch-size"], "needs a token limit"),
        (["--rollout-queue-max-groups", "3"], "would never be complete"),
        (["--no-save-optim"], "--no-save-optim without --use-stateless-adam, allowed: both"),
        (["--actor-num-gpus-per-node", "9"], "8 samples for 9 trainer ranks"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_a_next_step(model: Path, flags: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        checked(model, *flags)
    assert caught.value.next_step


def test_stray_word_is_refused(model: Path) -> None:
    with pytest.raises(SettingsError, match="Stray word 'oops'"):
        parse_settings(["oops", *words(model)])


def test_missing_flags_are_named_together() -> None:
    with pytest.raises(SettingsError, match="Missing: --hf-checkpoint, --prompt-data, --num-rollout"):
        validate(parse_settings([]))


def test_unknown_model_type_names_found_and_allowed(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(SettingsError, match="model_type is 'gpt2', allowed: qwen2, qwen3, "):
        checked(model)


def test_a_model_type_of_another_kind_is_named(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": ["qwen3"]}))
    with pytest.raises(SettingsError, match=r"model_type is \['qwen3'\], allowed: qwen2, qwen3, "):
        checked(model)


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json there"):
        checked(tmp_path / "nowhere")


def test_hook_args_are_flat_and_read_only(model: Path) -> None:
    args = HookArgs(checked(model))
    assert args.rollout_temperature == 1.0
    assert args.hf_checkpoint == str(model)
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="has no 'nope'"):
        _ = args.nope


def test_record_holds_every_setting_and_its_source(model: Path) -> None:
    resolved = resolve(words(model, "--wandb-key", "hush"))
    record = json.loads(settings_record(resolved))
    assert record["trainer"]["lr"] == resolved.settings.trainer.lr
    assert set(record) == {field.name for field in dataclasses.fields(Settings)} | {"sources"}
    assert record["sources"]["--lr"] == "default"
    assert record["sources"]["--num-rollout"] == "flag"
    assert record["logging"]["wandb_key"] == "***"


@pytest.mark.parametrize(
    ("flags", "leaves"),
    [
        ("", False),
        ("--offload-train", True),
        ("--offload", True),
        ("--colocate", True),
        ("--colocate --no-offload-train", False),
        ("--offload-rollout", False),
    ],
)
def test_the_trainer_leaves_the_devices_memory_where_it_is_asked_to_or_shares_them(flags: str, leaves: bool) -> None:
    assert parse_settings(flags.split()).cluster.trainer_leaves_memory is leaves


@pytest.mark.parametrize(
    ("flags", "leave"),
    [
        ("", False),
        ("--offload-rollout", True),
        ("--offload", True),
        ("--colocate", True),
        ("--colocate --no-offload-rollout", False),
        ("--offload-train", False),
    ],
)
def test_engines_sleep_where_it_is_asked_of_them_or_they_share_devices_and_then_run_no_further_than_the_next_batch(
    flags: str, leave: bool
) -> None:
    settings = parse_settings(flags.split())
    assert settings.cluster.engines_leave_memory is leave
    assert settings.queue.max_staleness == (0 if leave else None)
    assert parse_settings([*flags.split(), "--max-staleness", "3"]).queue.max_staleness == 3
