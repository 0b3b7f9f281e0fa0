"""Bash launch scripts become settings files that say the same."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.support.seed_model import MODEL_ARGS, MODEL_WORDS
from vime.cli.main import main
from vime.errors import SettingsError
from vime.settings.resolve import resolve
from vime.settings.script.reader import read_launch_script
from vime.settings.script.to_file import settings_tables

SCRIPT = r"""#!/bin/bash
pkill -9 vllm
set -ex
export PYTHONBUFFERED=16
NVLINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]' | wc -l)
if [ "$NVLINKS" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/model.sh"
MODEL=/models/Qwen3-4B
CKPT_ARGS=(
   --hf-checkpoint ${MODEL}
   #--hf-checkpoint /models/Qwen3-4B-FP8
   --save $MODEL/run#1   # the run's folder
)
ROLLOUT_ARGS=(
   --prompt-data '/data/$d.jsonl' --input-key prompt --rollout-stop "a b" 'c' --apply-chat-template
   --num-rollout ${STEPS:-3000} --rollout-sample-hook-path a.b --rollout-sample-hook-path c.d
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
PERF_ARGS+=(--disable-grpo-std-normalization --no-offload-train --lr=1e-5)
VLLM="--vllm-gpu-memory-utilization 0.7 --vllm-no-enable-prefix-caching"
RUNTIME_ENV_JSON="{ \"env_vars\": { \"PYTHONPATH\": \"/root/Megatron-LM/\" } }"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py --actor-num-nodes 1 \
   --apply-chat-template-kwargs '{"enable_thinking": false}' \
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} $VLLM \
   --router-balance-abs-threshold 0 "$@" > log.txt 2>&1
"""
FLAGS = [
    "--actor-num-nodes", "1", "--apply-chat-template-kwargs", '{"enable_thinking": false}', *MODEL_WORDS,
    "--hf-checkpoint", "/models/Qwen3-4B", "--save", "/models/Qwen3-4B/run#1", "--prompt-data", "/data/$d.jsonl",
    "--input-key", "prompt", "--rollout-stop", "a b", "c", "--apply-chat-template", "--num-rollout", "3000",
    "--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d", "--tensor-model-parallel-size", "2",
    "--sequence-parallel", "--disable-grpo-std-normalization", "--no-offload-train", "--lr=1e-5",
    "--vllm-gpu-memory-utilization", "0.7", "--vllm-no-enable-prefix-caching", "--router-balance-abs-threshold", "0",
]  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "model.sh").write_text(MODEL_ARGS)
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path / "run.sh"


def test_the_file_gives_the_same_settings_as_the_scripts_flags(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = script.with_name("run.toml")
    assert main(["import-script", str(script), "--output", str(output)]) == 0
    in_file = resolve(["--config", str(output)]).settings
    from_flags = resolve(FLAGS).settings
    assert dataclasses.replace(in_file, command=from_flags.command) == from_flags
    warnings = capsys.readouterr().err
    assert f"{script}:5: $(nvidia-smi topo" in warnings
    assert f"{script}:23: the runtime environment is not taken over" in warnings


def test_words_after_two_dashes_stand_for_the_scripts_own(script: Path) -> None:
    launch = read_launch_script(script, ["--rm-type", "math"])
    assert [word.text for word in launch.words][-2:] == ["--rm-type", "math"]


@pytest.mark.parametrize("order", ["{script} --output {output}", "--output {output} {script}"])
def test_the_scripts_own_words_come_after_all_else_in_any_order(script: Path, order: str) -> None:
    output = script.with_name("run.toml")
    named = order.format(script=script, output=output).split()
    assert main(["import-script", *named, "--", "--rm-type", "math", "--eps-clip", "0.3"]) == 0
    settings = resolve(["--config", str(output)]).settings
    assert (settings.rollout.rm_type, settings.objective.eps_clip) == ("math", 0.3)


def test_only_the_script_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-script"]) == 1
    assert "the following arguments are required: SCRIPT\n" in capsys.readouterr().err


def read(folder: Path, text: str, *arguments: str) -> tuple[list[str], list[str]]:
    """Words after train.py, and the notes without the script's folder."""
    script = folder / "run.sh"
    script.write_text(text)
    launch = read_launch_script(script, arguments)
    return [word.text for word in launch.words], [note.replace(str(script), "run.sh") for note in launch.notes]


@pytest.mark.parametrize("own", ['"$@"', '"${@}"', "$@", '"${@:2}"', "${@:2}", "$*", '"${@:1:3}"'])
def test_the_scripts_own_words_are_nothing_at_all_where_none_are_given(tmp_path: Path, own: str) -> None:
    text = f"python3 train.py --lr 1e-5 {own} --flush-cache-interval 0 {own}\n"
    words, notes = read(tmp_path, text)
    assert (words, notes) == (["--lr", "1e-5", "--flush-cache-interval", "0"], [])


def test_some_of_the_scripts_words_and_of_an_array_and_of_a_text(tmp_path: Path) -> None:
    text = 'A=(--lr 1e-5 --seed 3)\nV=v1.2\ntrain.py "${@:2}" "${@:1:1}" "${A[@]:2}" --save run-${V:1} "${A[@]:9}"\n'
    words, notes = read(tmp_path, text, "--x", "--y", "two words")
    assert words == ["--y", "two words", "--x", "--seed", "3", "--save", "run-1.2"]
    assert notes == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('"$*"', ["a b c"]),
        ('"${*:2}"', ["c"]),
        ('"${A[*]}"', ["--x 1 --y"]),
        ('"${A[*]:0:2}"', ["--x 1"]),
        ('${A[*]+"${A[*]}"}', ["--x 1 --y"]),
        ('${1+"$@"}', ["a b", "c"]),
        ('${N:-"a  b"} ${N:-a  b}', ["a  b", "a", "b"]),
        ('"p-$*-q"', ["p-a b c-q"]),
        ('"p-$@-q"', ["p-a b", "c-q"]),
        ('"p-${A[@]}-$1"', ["p---x", "1", "--y-a b"]),
        ('"p-${E[@]}"', ["p-"]),
        ('"${E[@]}"', []),
        ('"${E[*]}"', [""]),
        ('"${N:-${D}/x}"', ["d/x"]),
        ('"$D\\$D"', ["d$D"]),
    ],
)
def test_quoted_lists_are_joined_or_apart_as_in_bash(tmp_path: Path, written: str, words: list[str]) -> None:
    text = f"A=(--x 1 --y)\nE=()\nD=d\ntrain.py {written}\n"
    assert read(tmp_path, text, "a b", "c") == (words, [])
    script = f"{text.replace('train.py', 'printf [%s]')}"
    run = subprocess.run(["bash", "-c", script, "run.sh", "a b", "c"], capture_output=True, text=True, check=True)
    assert run.stdout == "".join(f"[{word}]" for word in words) or (not words and run.stdout == "[]")


def test_words_that_stand_only_where_a_variable_is_set(tmp_path: Path) -> None:
    text = (
        "A=(--lr 1e-5)\nE=()\nN=\n"
        'train.py ${A[@]+"${A[@]}"} ${E[@]+"${E[@]}"} ${N:+--no} ${M+--never} ${A:+--seed 3} "${1:-x}"\n'
    )
    assert read(tmp_path, text) == (["--lr", "1e-5", "--seed", "3", "x"], [])


def test_quotes_around_a_part_of_what_stands_for_a_variable_are_removed(tmp_path: Path) -> None:
    text = 'N=abc\ntrain.py ${N:+--wandb-group "$N"} ${N:+--wandb-project "p-$N"-x} --save "${D:-\'/runs\'}"\n'
    assert read(tmp_path, text) == (["--wandb-group", "abc", "--wandb-project", "p-abc-x", "--save", "/runs"], [])


@pytest.mark.parametrize("written", ["${}", '"${}"'])
def test_a_variable_without_a_name_is_told(tmp_path: Path, written: str) -> None:
    words, notes = read(tmp_path, f"train.py --save run{written}\n")
    assert words == ["--save", "run"]
    assert notes == ["run.sh:1: ${} is more than this command can fill in; it is left empty."]


def test_shift_lets_go_of_the_scripts_first_words(tmp_path: Path) -> None:
    text = 'M=${1:?model}\nshift\ntrain.py --seed "$1" "$@"\n'.replace(":?model", "")
    assert read(tmp_path, text, "m", "3", "--lr=1") == (["--seed", "3", "3", "--lr=1"], [])
    assert read(tmp_path, 'shift 2\ntrain.py "$@" "${3:-none}"\n', "a", "b", "c") == (["c", "none"], [])
    assert read(tmp_path, 'shift 4\ntrain.py "$@"\n', "a", "b") == (["a", "b"], [])
    words, (note,) = read(tmp_path, 'if [ $# -gt 1 ]; then\n  shift\nfi\ntrain.py "$@"\n', "a", "b")
    assert words == ["a", "b"]
    assert note.startswith("run.sh:2: what is shifted")


def test_a_folder_above_the_script_is_named_as_such(tmp_path: Path) -> None:
    words, notes = read(tmp_path, 'root=$(cd "$(dirname "$0")/../.." && pwd)\ntrain.py --save $root/runs\n')
    assert (words, notes) == (["--save", f"{tmp_path}/../../runs"], [])


def test_what_a_condition_adds_to_an_array_is_told_once(tmp_path: Path) -> None:
    text = 'M=(--lr 1e-5)\nif [ -e x ]; then\n  M+=(--load x)\nfi\ntrain.py "${M[@]}" "${M[@]}"\n'
    words, notes = read(tmp_path, text)
    assert words == ["--lr", "1e-5"] * 2
    assert notes == ["run.sh:5: $M is changed inside a condition or loop at run.sh:3, which is not followed."]


def test_a_stray_word_takes_no_flag_along(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --lr 1e-5 stray --use-tis '' --flush-cache-interval 0 ''\n")
    tables, notes = settings_tables(read_launch_script(script))
    assert tables["trainer"]["lr"] == 1e-5
    assert tables["objective"]["use_tis"] is True
    assert tables["weights"]["flush_cache_interval"] == 0
    assert [note.partition("run.sh:")[2] for note in notes] == [
        "1: Stray word 'stray' after --lr, which takes no more.",
        "1: Stray word '' after --use-tis, which takes no more.",
        "1: Stray word '' after --flush-cache-interval, which takes no more.",
    ]


EXAMPLES = sorted(Path(__file__).parents[4].glob("examples/*/run.sh"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_loses_nothing(script: Path) -> None:
    tables, notes = settings_tables(read_launch_script(script))
    taken = {"--" + key.replace("_", "-") for entries in tables.values() for key in entries}
    in_arrays = [line.split() for line in script.read_text().splitlines() if line.startswith("    --")]
    written = {word.partition("=")[0] for words in in_arrays for word in words if word.startswith("--")}
    assert written
    assert {flag.replace("--vllm-", "--") for flag in written} <= taken
    assert not [note for note in notes if "Stray" in note]


def test_what_cannot_be_mapped_is_listed_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("""ARGS=(
  --rolout-batch-size 4
  --lr fast
  --their-flag 1
  --sglang-context-length 9
  --config other.toml
)
source missing.sh
for i in 1 2; do
  X=$i
done
python train.py stray ${ARGS[@]} --save "$X" --seed $HOME/x
""")
    tables, notes = settings_tables(read_launch_script(script))
    text = "\n".join(notes).replace(str(script), "run.sh")
    assert "run.sh:2: --rolout-batch-size is not a flag; the nearest one is --rollout-batch-size." in text
    assert "run.sh:3: Argument --lr: invalid float value: 'fast'." in text
    assert "run.sh:4: --their-flag is a flag neither of vime nor of Megatron" in text
    assert "run.sh:5: --sglang-context-length is a flag of SGLang" in text
    assert "(the nearest one is --vllm-max-model-len)" in text
    assert "run.sh:6: --config can't be set in a file" in text
    assert "run.sh:8: missing.sh can't be read" in text
    assert (
        "run.sh:12: $X has no value in the script; it is left empty. It is set inside a condition or loop at run.sh:10"
        in text
    )
    assert "run.sh:12: $HOME has no value in the script" in text
    assert "run.sh:12: the word 'stray' belongs to no flag." in text
    assert tables["megatron_args"] == {"their-flag": 1, "sglang-context-length": 9}


def test_a_script_is_never_run(tmp_path: Path) -> None:
    script, trace = tmp_path / "run.sh", tmp_path / "trace"
    script.write_text(f"touch {trace}\nX=$(touch {trace})\npython3 train.py --save `touch {trace}` --lr 1e-6\n")
    read_launch_script(script)
    assert not trace.exists()


def test_a_script_without_a_training_command_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo hello\n")
    with pytest.raises(SettingsError, match=r"no command runs train\.py"):
        read_launch_script(script)
    with pytest.raises(SettingsError, match=r"nowhere\.sh"):
        read_launch_script(tmp_path / "nowhere.sh")


def test_vime_train_is_a_training_command_too(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("cd /somewhere && CUDA_VISIBLE_DEVICES=0 vime train --lr 1e-6 && echo done\n")
    assert [word.text for word in read_launch_script(script).words] == ["--lr", "1e-6"]


def test_copying_the_script_is_no_training_and_text_and_arrays_can_grow(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "cp train.py /tmp\nsource run.sh\nNAME=a\nNAME+=b\nARGS=(--save $NAME)\nARGS+=(--lr 1e-6)\n"
        "${PYTHON:-python3} -u /opt/vime/train.py ${ARGS[*]}\n"
    )
    launch = read_launch_script(script)
    assert [word.text for word in launch.words] == ["--save", "ab", "--lr", "1e-6"]
    assert [note.partition("run.sh:")[2] for note in launch.notes] == ["2: run.sh sources itself; left out."]
