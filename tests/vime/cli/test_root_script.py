"""`python train.py`, alone and with a Megatron that has flags of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seed_model import QWEN3_4B
from vime.cli.script import errors_as_exit_status, parse_args, train
from vime.errors import SettingsError, VersionMismatchError

ROOT = Path(__file__).resolve().parents[3]
PRETRAIN_GPT = """
def extra_args_provider(parser):
    parser.add_argument("--my-moe-tweak", type=float, default=0.5)
    return parser
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "p.jsonl").write_text('{"input": "a", "label": "b"}\n')
    return [
        "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "4", "--rollout-max-response-len", "8", "--rm-type", "random",
        "--save", str(tmp_path / "run"), "--rollout-data-transport", "straw", "--actor-num-gpus-per-node", "1",
        "--dry-run",
    ]  # fmt: skip


def run_script(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words], env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_scripts_args_are_flat_and_start_a_run(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_args(argv=[*flags, "--vllm-max-model-len", "64"])
    assert args.rollout_batch_size == 4
    train(args)
    assert capsys.readouterr().out


def test_train_takes_only_what_parse_args_returned() -> None:
    with pytest.raises(SettingsError, match="train got a dict, allowed: what parse_args returned"):
        train({})  # type: ignore[arg-type]


def test_help_ends_the_script_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv=["--help"])
    assert caught.value.code == 0
    assert "--hf-checkpoint" in capsys.readouterr().out


def test_errors_of_the_script_have_a_next_step_and_no_traceback(flags: list[str], tmp_path: Path) -> None:
    done = run_script(tmp_path, *flags, "--num-layers", "24")
    assert done.returncode == 1
    assert "--num-layers is 24, but config.json (num_hidden_layers) has 36" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "status"), [(SettingsError("x"), 1), (VersionMismatchError("x"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_script_ends_with_the_statuses_of_the_command(error: BaseException, status: int) -> None:
    with pytest.raises(SystemExit) as caught, errors_as_exit_status():
        raise error
    assert caught.value.code == status


@pytest.mark.slow
def test_flags_of_pretrain_gpt_are_accepted_when_it_can_be_imported(flags: list[str], tmp_path: Path) -> None:
    refused = run_script(tmp_path, *flags, "--my-moe-tweak", "0.1")
    assert "--my-moe-tweak is a flag neither of vime nor of the installed Megatron" in refused.stderr
    (tmp_path / "pretrain_gpt.py").write_text(PRETRAIN_GPT)
    accepted = run_script(tmp_path, *flags, "--my-moe-tweak", "0.1")
    assert accepted.returncode == 0, accepted.stderr


@pytest.mark.slow
def test_they_reach_megatrons_arguments_with_the_models_shape(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pretrain.py").write_text(PRETRAIN_GPT)
    monkeypatch.syspath_prepend(tmp_path)
    path = ["--extra-args-provider-path", "my_pretrain.extra_args_provider"]
    args = parse_args(argv=[*flags, *path, "--my-moe-tweak", "0.1", "--clip-grad", "0.7"])
    assert args.my_moe_tweak == 0.1
    assert args.num_layers == 36
    assert args.layernorm_epsilon == 1e-6
    assert args.clip_grad == 0.7


@pytest.mark.slow
def test_the_trainer_refuses_a_shape_that_the_config_contradicts(flags: list[str]) -> None:
    args = parse_args(argv=[*flags, "--num-layers", "24"])
    with pytest.raises(SettingsError, match=r"--num-layers is 24, but config\.json \(num_hidden_layers\) has 36"):
        _ = args.tensor_model_parallel_size


@pytest.mark.slow
def test_flags_of_a_modified_megatron_on_pythonpath_are_accepted(flags: list[str], tmp_path: Path) -> None:
    from importlib.util import find_spec

    spec = find_spec("megatron.training")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    modified = tmp_path / "megatron" / "training"
    modified.mkdir(parents=True)
    (tmp_path / "megatron" / "core").symlink_to(installed.parent / "core")
    for file in installed.iterdir():
        (modified / file.name).symlink_to(file)
    arguments = (installed / "arguments.py").read_text()
    (modified / "arguments.py").unlink()
    marker = "def add_megatron_arguments(parser: argparse.ArgumentParser):\n"
    assert marker in arguments
    (modified / "arguments.py").write_text(
        arguments.replace(marker, marker + "    parser.add_argument('--their-own-flag', type=int)\n")
    )
    done = run_script(tmp_path, *flags, "--their-own-flag", "3")
    assert done.returncode == 0, done.stderr
