"""Every command block of the documentation, as printed there, gives the documented settings.

A block is read as a launch script, as a user would paste it; paths of the documentation become real ones.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recovery.commit import QueueState
from tests.recovery.commits import commit
from tests.support.seed_model import MODEL_ARGS, MODEL_WORDS, QWEN3_4B
from vime.cli.main import main
from vime.settings.groups import all_flags
from vime.settings.script.reader import read_launch_script

NUM_GPUS = "16"
HOOKS = """
def init(args): ...
def before_log_prob(args, model, store_prefix): ...
def before_train_step(args, rollout_id, step_id, model, optimizer, scheduler): ...
"""


@dataclass(frozen=True)
class Block:
    """One block or inline command: its text, the settings it documents, and the flags that it passes on.

    `beside` are flags that the documentation names elsewhere and that the block can't do without.
    """

    title: str
    text: str
    expected: dict[str, Any] = field(default_factory=dict)
    megatron: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


PARALLELISM = (
    "--tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 "
    "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)

BLOCKS = (
    Block("model parameters of qwen3 4B", MODEL_ARGS, megatron=tuple(MODEL_WORDS)),
    Block(
        "fields of the data",
        "--input-key prompt\n--label-key label\n--apply-chat-template\n",
        {"input_key": "prompt", "label_key": "label", "apply_chat_template": True},
    ),
    Block("GRPO", "--advantage-estimator grpo\n", {"advantage_estimator": "grpo"}),
    Block(
        "score centering",
        """--use-score-centering \\
--score-centering-top-k 128 \\
--pg-loss-type reinforce \\
--advantage-estimator grpo \\
--disable-grpo-std-normalization \\
--calculate-per-token-loss \\
--rollout-temperature 1.0 \\
--rollout-top-p 1.0 \\
--rollout-top-k -1 \\
--entropy-coef 0 \\
--kl-coef 0
""",
        {
            "use_score_centering": True, "score_centering_top_k": 128, "pg_loss_type": "reinforce",
            "advantage_estimator": "grpo", "grpo_std_normalization": False, "calculate_per_token_loss": True,
            "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "entropy_coef": 0.0, "kl_coef": 0.0,
        },
    ),
    Block(
        "distributed fully async rollout with straw",
        """--rollout-function-path vime.rollout.fully_async_rollout.generate_rollout_fully_async \\
--rollout-data-transport straw \\
--rollout-data-dir /shared/run/rollout_data
""",
        {
            "rollout_function_path": "vime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "rollout_data_transport": "straw", "rollout_data_dir": "{tmp}/shared/run/rollout_data",
        },
    ),
    Block(
        "keeping KV across weight updates",
        "--flush-cache-interval 8 \\\n--use-rollout-logprobs\n",
        {"flush_cache_interval": 8, "use_rollout_logprobs": True},
    ),
    # The block of the checkpoint folder is a listing; these are the flags that its text explains.
    Block("checkpoint step", "--load /ckpt/ --ckpt-step 100\n", {"load": "{tmp}/ckpt/", "ckpt_step": 100},
          beside=("--save", "{tmp}/ckpt", "--num-rollout", "200")),
    Block("checkpoint formats", "--ckpt-format torch_dist", megatron=("--ckpt-format", "torch_dist")),
    # Commands inside the text.
    Block("the backend", "--train-backend megatron", {"train_backend": "megatron"}),
    Block("balanced router", "--router-balance-abs-threshold 0", router=("--router-balance-abs-threshold", "0")),
    Block("session affinity", "--router-policy consistent_hash", router=("--router-policy", "consistent_hash")),
    Block(
        "engines of others",
        "--rollout-external-engine-addrs host1:8000 host2:8000",
        {"rollout_external_engine_addrs": ("host1:8000", "host2:8000")},
    ),
    Block(
        "full weights through a folder",
        "--update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /shared/fs/updates",
        {
            "update_weight_mode": "full", "update_weight_transport": "disk",
            "update_weight_disk_dir": "{tmp}/shared/fs/updates",
        },
    ),
    Block(
        "changed weights through a folder",
        "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /shared/fs/updates "
        "--update-weight-local-checkpoint-dir /shared/fs/local",
        {"update_weight_mode": "delta", "update_weight_transport": "disk"},
    ),
    Block(
        "engine arguments",
        "--vllm-gpu-memory-utilization 0.7 --vllm-max-model-len 65536 --vllm-enable-expert-parallel "
        "--vllm-data-parallel-size 1",
        vllm=(
            "--vllm-gpu-memory-utilization", "0.7", "--vllm-max-model-len", "65536", "--vllm-enable-expert-parallel",
            "--vllm-data-parallel-size", "1",
        ),
    ),
    Block(
        "an external router",
        "--vllm-router-ip 10.0.0.1 --vllm-router-port 30000",
        {"vllm_router_ip": "10.0.0.1", "vllm_router_port": 30000},
    ),
    Block(
        "parallelism and recomputation",
        PARALLELISM,
        megatron=tuple(PARALLELISM.split()),
    ),
    Block(
        "cluster resources",
        "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2",
        {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
    ),
    Block("shared devices", "--colocate", {"colocate": True}),
    Block("on-policy distillation", "--use-opd --opd-kl-coef 1.0 --opd-type vllm", {"use_opd": True},
          beside=("--rm-url", "http://teacher:8000/generate")),
    Block(
        "hooks of the trainer",
        "--custom-megatron-init-path seed_hooks.init "
        "--custom-megatron-before-log-prob-hook-path seed_hooks.before_log_prob "
        "--custom-megatron-before-train-step-hook-path seed_hooks.before_train_step",
        {"custom_megatron_init_path": "seed_hooks.init",
            "custom_megatron_before_train_step_hook_path": "seed_hooks.before_train_step",},
    ),
)  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    for folder in ("ckpt", "shared/run", "shared/fs/updates", "shared/fs/local"):
        (tmp_path / folder).mkdir(parents=True)
    commit(tmp_path / "ckpt", 100, QueueState(trained=[], next_group_index=0, identity={}))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "input": "a", "label": "b"}\n')
    (tmp_path / "seed_hooks.py").write_text(HOOKS)
    return [
        "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8",
        "--rm-type", "random", "--save", str(tmp_path / "run"), "--actor-num-gpus-per-node", "1",
    ]  # fmt: skip


def words_of(block: Block, tmp_path: Path) -> list[str]:
    """The words that a launch script with this block hands to train.py."""
    text = block.text.replace(" /ckpt/", f" {tmp_path}/ckpt/").replace(" /shared/", f" {tmp_path}/shared/")
    script = tmp_path / "run.sh"
    if "MODEL_ARGS" in text:
        script.write_text(f"{text}\npython3 train.py ${{MODEL_ARGS[@]}}\n")
    else:
        script.write_text("python3 train.py " + text.rstrip().replace(" \\\n", "\n").replace("\n", " \\\n") + "\n")
    launch = read_launch_script(script)
    assert launch.notes == []
    return [word.text for word in launch.words]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.title)
def test_a_documented_command_gives_the_documented_settings(
    block: Block,
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # modules of hooks are searched there
    beside = [word.replace("{tmp}", str(tmp_path)) for word in block.beside]
    words = [*base, *words_of(block, tmp_path), *beside]
    status = main(["train", "--dry-run", "--json", "--assume-gpus", NUM_GPUS, *words])
    out, said = capsys.readouterr()
    assert status == 0, said or out
    shown = json.loads(out)
    assert shown["problems"] == []
    assert shown["start"]["rollout"] == (101 if "--ckpt-step" in words else 0)
    rows = {row["flag"]: row for row in shown["settings"]}
    for name, value in block.expected.items():
        expected = value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value
        row = rows[all_flags()[name][1].name]
        assert row["value"] == (list(expected) if isinstance(expected, tuple) else expected), name
        assert row["source"] == "flag", name
    assert shown["passed_on"] == {
        "megatron": list(block.megatron), "vllm": list(block.vllm), "router": list(block.router)
    }  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_model_parameters_may_be_left_out(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--assume-gpus", NUM_GPUS, *base]) == 0
    assert "Nothing was started." in capsys.readouterr().out
