"""What --memory-recorder writes, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memray
import numpy as np
import pytest
import torch

from pipeline.memory_record import memory_record
from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


def asked(folder: Path, *flags: str) -> Settings:
    return parse_settings(["--memory-snapshot-dir", str(folder / "memory"), *flags])


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert memory_record(asked(tmp_path), 0) is None
    assert not (tmp_path / "memory").exists()


def test_memray_records_the_first_batches_and_nothing_after_them(tmp_path: Path) -> None:
    record = memory_record(asked(tmp_path, "--memory-recorder", "memray", "--memory-snapshot-num-steps", "2"), 3)
    assert record is not None
    kept = [np.zeros(1 << 20)]
    record.batch_trained()
    kept.append(np.zeros(2 << 20))
    record.batch_trained()
    kept.append(np.zeros(3 << 20))
    record.close()
    (path,) = (tmp_path / "memory").iterdir()
    assert path.name.startswith("memory_rank_3_")
    with memray.FileReader(path) as reader:
        sizes = {found.size for found in reader.get_allocation_records()}
    assert {8 << 20, 16 << 20} <= sizes
    assert 24 << 20 not in sizes


def test_without_a_number_of_batches_memray_records_until_the_rank_closes(tmp_path: Path) -> None:
    record = memory_record(asked(tmp_path, "--memory-recorder", "memray"), 0)
    assert record is not None
    for _ in range(5):
        record.batch_trained()
    kept = np.zeros(5 << 20)
    record.close()
    (path,) = (tmp_path / "memory").iterdir()
    with memray.FileReader(path) as reader:
        assert kept.nbytes in {found.size for found in reader.get_allocation_records()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flags", [("--memory-snapshot-num-steps", "1"), ("--record-memory-history",)])
def test_torchs_recorder_is_refused_where_there_is_no_gpu(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="--memory-recorder torch records memory of CUDA") as caught:
        memory_record(asked(tmp_path, *flags), 0)
    assert "memray" in str(caught.value.next_step)


def test_torchs_recorder_writes_its_snapshot_after_the_batches(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[Any] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _dump_snapshot=lambda path: calls.append(Path(path).name),
    )
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, memory=memory))
    record = memory_record(asked(tmp_path, "--memory-snapshot-num-steps", "1"), 2, clock=lambda: 17.0)
    assert record is not None
    assert calls == [{"max_entries": 1_000_000}]
    record.batch_trained()
    record.close()
    assert calls[1:] == ["memory_rank_2_17.pickle", {"enabled": None}]


@pytest.mark.gpu
def test_a_snapshot_of_cuda_memory_has_what_was_allocated(tmp_path: Path) -> None:
    record = memory_record(asked(tmp_path, "--memory-snapshot-num-steps", "1"), 0)
    assert record is not None
    kept = torch.zeros(3 << 20, device="cuda")
    record.batch_trained()
    (path,) = (tmp_path / "memory").iterdir()
    assert kept.is_cuda
    assert path.stat().st_size > 0
