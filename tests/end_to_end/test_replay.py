"""A run on stand-in engines; then its rollouts are trained again without any, and compared with what it logged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.changed_line import changed_line
from tests.end_to_end.jobs import Job
from tests.end_to_end.standin_jobs import run_standin, vime

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four rollouts of two steps each, with commits after rollouts 1 and 3, and dumps of what passed through."""
    folder = tmp_path_factory.mktemp("job")
    return finished(folder, {"--num-rollout": 4, "--save-interval": 2, "--dump-details": folder / "details"})


@pytest.fixture(scope="module")
def job_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two rollouts of two steps each, with a commit after the first."""
    flags = {"--num-rollout": 2, "--save-interval": 1, "--actor-num-gpus-per-node": 2}
    return finished(tmp_path_factory.mktemp("two"), flags)


def finished(folder: Path, flags: dict[str, Any]) -> Job:
    always: dict[str, Any] = {
        "--num-steps-per-rollout": 2,
        "--trainer-num-threads": 1,
        "--custom-rm-path": "tests.end_to_end.rewards.by_index",
        "--parity-probes": 0,  # no trainer agrees with a stand-in
    }
    made = Job(folder, flags=always | flags)
    made.prepare()
    done = run_standin(made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file and folder."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def test_a_stored_rollout_is_trained_again_bitwise_equal_and_its_run_is_only_read(job: Job) -> None:
    before = tree(job.run)
    done = vime("replay", job.run, "--rollout", 3, "--check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["verdict"].startswith("bitwise equal")
    assert (report["commit"], report["trained"]) == (1, [2, 3])
    # Two rollouts of two steps: 16 samples and some metrics each; then the parameters.
    assert report["comparison"]["num_values"] > 2 * (2 * (16 + 8) + 10)
    assert tree(job.run) == before


def test_a_changed_line_in_a_loss_formula_is_named_where_it_first_shows(job: Job, tmp_path: Path) -> None:
    done = vime("replay", job.run, "--rollout", 2, "--check", path=with_changed_formula(tmp_path))
    assert done.returncode == 6, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("not bitwise equal: differs first at rollout 2, step 0, loss of sample "), last
    assert ": the run has " in last


def with_changed_formula(folder: Path) -> Path:
    """A path with another weight of each token in the loss."""
    return changed_line(
        folder / "changed",
        "vime.algorithms.aggregate",
        "return mask / max(totals.num_trained_tokens, 1)",
        "return mask / (max(totals.num_trained_tokens, 1) + 1e-3)",
    )


def test_a_rollout_of_two_ranks_is_trained_again_bitwise_equal_by_two(job_of_two_ranks: Job) -> None:
    done = vime("replay", job_of_two_ranks.run, "--rollout", 1, "--check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"].startswith("bitwise equal (")
    # Of two steps: the losses of 16 samples, whichever rank had them, and the metrics; then the parameters.
    assert report["comparison"]["num_values"] > 2 * (16 + 8) + 10


def test_a_changed_line_is_named_where_it_first_shows_in_a_rollout_of_two_ranks_too(
    job_of_two_ranks: Job, tmp_path: Path
) -> None:
    path = with_changed_formula(tmp_path)
    done = vime("replay", job_of_two_ranks.run, "--rollout", 1, "--check", path=path)
    assert done.returncode == 6, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("not bitwise equal: differs first at rollout 1, step 0, loss of sample "), last


def test_a_rollout_before_the_first_commit_is_trained_again_from_the_first_weights_on_two_ranks(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "two.toml").write_text("[cluster]\nactor_num_gpus_per_node = 2\n")
    done = vime("replay", job.run, "--rollout", 0, "--check", "--settings", tmp_path / "two.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the first weights of the run" in done.stdout
    assert "Another layout (ranks: 1 in the run, 2 here)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal within 0.001")


def test_a_changed_setting_shows_what_changes_for_each_sample(job: Job, tmp_path: Path) -> None:
    (tmp_path / "changed.toml").write_text("[objective]\nentropy_coef = 0.1\n")
    done = vime("replay", job.run, "--rollout", 3, "--diff", tmp_path / "changed.toml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == f"32 of 32 samples have another loss under {tmp_path / 'changed.toml'}"
    assert report["comparison"]["differences"] == [], "rollout 2 is trained as it was"
    changes = report["sample_changes"]
    assert all(change["found"] < change["logged"] for change in changes), "entropy lowers every loss"


def test_a_damaged_checkpoint_is_refused_naming_the_file(job: Job, tmp_path: Path) -> None:
    shutil.copytree(job.run, tmp_path / "run")
    damaged = next((tmp_path / "run" / "iter_0000001").rglob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = vime("replay", tmp_path / "run", "--rollout", 2, "--check")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{damaged}: SHA-256 is" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--rollout", 9], 1, "Rollout 9 was not trained along this line of sessions; it trained 0 to 3"),
        (["--rollout", 2, "--branch", "none"], 1, "Session none is none of this run's"),
        (["--rollout", 2, "--hf-checkpoint", "/absent"], 1, "--hf-checkpoint /absent is no folder"),
        (["--rollout", 2, "--check", "--diff", "x.toml"], 1, "--check compares with the run"),
    ],
)
def test_what_can_not_be_replayed_is_refused_with_a_reason(
    job: Job, words: list[object], status: int, said: str
) -> None:
    done = vime("replay", job.run, *words)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stderr


def test_training_alone_repeats_the_losses_of_the_run_from_its_dumps(job: Job, tmp_path: Path) -> None:
    details = job.flags["--dump-details"]
    assert sorted(path.name for path in (details / "rollout_data").iterdir()) == ["0.pt", "1.pt", "2.pt", "3.pt"]
    assert (details / "tokenizer" / "tokenizer.json").exists()
    again = Job(
        tmp_path,
        flags={
            **job.flags,
            "--hf-checkpoint": job.model,
            "--prompt-data": None,
            "--num-rollout": 2,
            "--flush-cache-interval": None,
            "--dump-details": tmp_path / "details",
            "--load-debug-rollout-data": details / "rollout_data" / "{rollout_id}.pt",
        },
    )
    done = run_standin(again)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [step["train"]["loss"] for step in again.steps()]
    assert losses == [step["train"]["loss"] for step in job.steps()[:2]]
    assert not (again.run / "debug_data").exists()
    assert (again.run / "latest_checkpointed_iteration.txt").read_text() == "1"
    one, other = (folder / "train_data" / "1_0.pt" for folder in (details, tmp_path / "details"))
    assert train_data(one) == train_data(other)


def train_data(path: Path) -> list[Any]:
    """Tokens and advantages of each microbatch."""
    import torch

    content = torch.load(path, weights_only=True)
    return [
        (microbatch["tokens"].tolist(), microbatch["advantages"].tolist())
        for step in content["steps"]
        for microbatch in step
    ]
