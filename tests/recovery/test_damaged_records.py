"""Every record of a run that commands read is named where it is damaged, is a folder, or holds something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.metric_sinks.configs import WandbConfig
from pipeline.training_log import read_training_logs
from recovery.audit import audit_run
from recovery.audit_parts import newest_commit, read_branches_raw, training_steps
from recovery.branch import read_branches
from recovery.claim import read_claim
from recovery.fixed import FixedSettings, refuse_changed
from recovery.home import home_of
from recovery.pointer import read_tracker
from recovery.run_location import RunLocation, RunSettings
from storage.journal_replay import segment_folders
from storage.segment import journal_path
from storage.step_log import read_step_log, trained_on_disk
from vime.errors import VimeError


def wandb_run(run: Path) -> object:
    return pytest.importorskip("pipeline.metric_sinks.wandb_sink").wandb_state(
        WandbConfig(folder="", state=str(run / "wandb.json"), run_settings="", default_name="run")
    )


STARTED_WITH = FixedSettings("rollout", "digest", 1, False, 1)
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "claim": ("queue.json", lambda run: read_claim(run / "queue.json")),
    "home": ("rollout/home.json", home_of),
    "settings of the start": ("rollout/fixed.json", lambda run: refuse_changed(run, STARTED_WITH)),
    "run at Weights & Biases": ("wandb.json", wandb_run),
    "branches": ("rollout/branches.jsonl", read_branches),
    "branches of an audit": ("rollout/branches.jsonl", read_branches_raw),
    "pointer": ("rollout/current.json", read_tracker),
    "queues": ("queues/a/run.json", segment_folders),
    "journal": ("queues/a/run.json", lambda run: journal_path(run, "a")),
    "training log": (
        "training_log/rank_0.jsonl",
        lambda run: list(read_training_logs([run / "training_log/rank_0.jsonl"])),
    ),
    "training log of an audit": ("training_log/rank_0.jsonl", lambda run: list(training_steps(run))),
    "commit of an audit": (
        "rollout/committed_3.json",
        lambda run: newest_commit(run, {"b": {"directory": "."}}, {"b": 9}),
    ),
    "step log": ("trained.jsonl", read_step_log),
    "step log of a branch": ("trained.jsonl", lambda run: trained_on_disk(run, "b")),
}
MAY_BE_NO_FILE = ("home", "pointer")
"""A folder in their place is none of them."""


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    """A file with this content, or a folder in its place."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [None, b"{}\n{}\n", b"[1]\n[1]\n", b"null\nnull\n", b"\x80\xff\n\x80\n"])
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_record_is_named(tmp_path: Path, reader: str, content: bytes | None) -> None:
    name, read = READERS[reader]
    path = damaged(tmp_path, name, content)
    if content is None and reader in MAY_BE_NO_FILE:
        read(tmp_path)
        return
    is_line = reader.endswith("of an audit") and path.suffix == ".jsonl"
    if is_line and content is not None and not content.startswith(b"{"):
        # An audit takes facts from lines that are whole; all else may be the torn end of a crash.
        assert not list(read(tmp_path))  # type: ignore[call-overload]
        return
    with pytest.raises(VimeError) as caught:
        read(tmp_path)
    assert str(path) in caught.value.message


def test_an_audit_names_a_commit_whose_queue_state_is_gone(tmp_path: Path) -> None:
    damaged(tmp_path, "rollout/branches.jsonl", b'{"branch": "b", "parent": null, "directory": "."}\n')
    damaged(tmp_path, "rollout/committed_0.json", b'{"branch": "b", "rollout_id": 0}')
    log = b'{"branch": "b", "rollout_id": 0, "step": 0, "data_parallel_rank": 0, "group_indices": [], '
    damaged(tmp_path, "training_log/rank_0.jsonl", log + b'"sample_indices": []}\n')
    (tmp_path / "rollout" / "step_log").mkdir()
    with pytest.raises(VimeError, match=r"queue_state_0\.json can't be read"):
        audit_run(tmp_path)


@pytest.mark.parametrize("content", [b"\x80\xff", b"", "\u0665".encode(), b"not a number"])
def test_a_lock_that_names_no_process_is_nobodys(tmp_path: Path, content: bytes) -> None:
    damaged(tmp_path, "rollout/session.lock", content)
    damaged(tmp_path, "latest_checkpointed_iteration.txt", content)
    assert RunLocation(tmp_path, tmp_path, RunSettings()).driver() is None
    assert read_tracker(tmp_path).text == content.decode(errors="replace")
