"""From flags to the user's functions in the trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.trainer_hooks import trainer_hooks
from pipeline.trainer_wiring import trainer_config
from vime.backends.megatron_utils.trainer_hooks import Hook, StepPlace, TrainerHooks
from vime.errors import SettingsError, TrainerError
from vime.settings.parse import parse_settings

FLAGS = {
    "model_provider": "--custom-model-provider-path",
    "init": "--custom-megatron-init-path",
    "before_log_prob": "--custom-megatron-before-log-prob-hook-path",
    "before_train_step": "--custom-megatron-before-train-step-hook-path",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    functions = "".join(f"def {name}(*args): return args\n" for name in FLAGS)
    (tmp_path / "trainer_hooks_of_a_user.py").write_text(functions)
    monkeypatch.syspath_prepend(tmp_path)
    yield "trainer_hooks_of_a_user"
    sys.modules.pop("trainer_hooks_of_a_user", None)


def test_each_flag_names_its_hook(module: str) -> None:
    words = [word for name, flag in FLAGS.items() for word in (flag, f"{module}.{name}")]
    hooks = trainer_config(parse_settings(["--global-batch-size", "4", *words]), 1).hooks
    for name, flag in FLAGS.items():
        hook = vars(hooks)[name]
        assert (hook.flag, hook.path, hook(1, 2)) == (flag, f"{module}.{name}", (1, 2))


def test_hooks_see_vimes_flags_and_megatrons_arguments() -> None:
    args = trainer_hooks(parse_settings(["--lr", "0.5", "--eps-clip", "0.3"])).args(
        argparse.Namespace(lr=9.0, padded_vocab_size=64)
    )
    assert (args.lr, args.eps_clip, args.padded_vocab_size) == (0.5, 0.3, 64)


def test_without_flags_nothing_is_called() -> None:
    hooks = trainer_hooks(parse_settings([]))
    assert [vars(hooks)[name] for name in FLAGS] == [None] * 4
    hooks.initialised(argparse.Namespace())
    hooks.computes_log_probs(argparse.Namespace(), [], "")
    hooks.takes_step(argparse.Namespace(), StepPlace(), [], None, None)


def test_a_hook_that_cannot_be_loaded_is_refused(module: str) -> None:
    with pytest.raises(SettingsError, match=f"--custom-megatron-init-path {module}.nothing: .* has no 'nothing'"):
        trainer_hooks(parse_settings(["--custom-megatron-init-path", f"{module}.nothing"]))


def test_whatever_a_hook_raises_comes_with_its_name() -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("by zero")

    hooks = TrainerHooks(init=Hook(FLAGS["init"], "mine.fail", fail))
    with pytest.raises(TrainerError, match=r"--custom-megatron-init-path mine\.fail raised ZeroDivisionError: by zero"):
        hooks.initialised(argparse.Namespace())
