"""One rank's part in publications."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.trainer_weights import PublishSettings, TrainerWeights
from vime.backends.vllm_utils.weight_folder import read_weight_folder
from vime.errors import PublicationError, TrainerError


class Trainer:
    """Counts how far its weights were gathered, which all ranks do together."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.is_first = is_first
        self.num_gathered = 0

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            self.num_gathered += 1
            if self.is_first:
                yield f"layer.{number}", torch.full((3,), float(number))


def test_the_first_rank_writes_and_the_others_gather_with_it(tmp_path: Path) -> None:
    first, second = Trainer(), Trainer(is_first=False)
    ranks = [
        TrainerWeights(trainer, rank, PublishSettings(disk_dir=tmp_path))
        for rank, trainer in enumerate((first, second))
    ]
    written, other = [rank.write_version(4, full=False) for rank in ranks]
    assert first.num_gathered == second.num_gathered == 5
    assert written.folder == other.folder == str(tmp_path / "weight_v000004")
    assert len(list(read_weight_folder(Path(written.folder), written.names))) == 5
    assert written.wire_bytes > written.num_bytes == written.changed_bytes == 60
    assert ranks[0].highest_version() == 4


def test_a_rank_whose_writing_fails_gathers_to_the_end_so_that_no_other_waits(tmp_path: Path) -> None:
    (tmp_path / "weight_v000001").mkdir()
    trainer = Trainer()
    weights = TrainerWeights(trainer, 0, PublishSettings(disk_dir=tmp_path))
    with pytest.raises(PublicationError, match="can't be written"):
        weights.write_version(1, full=True)
    assert trainer.num_gathered == 5


def test_a_rank_whose_sending_fails_gathers_to_the_end_so_that_no_other_waits() -> None:
    trainer = Trainer()
    weights = TrainerWeights(trainer, 0, PublishSettings())
    weights.open_sender("127.0.0.1", ["http://10.0.0.1:8000"], timeout_s=0.1)
    with pytest.raises(PublicationError, match="did not start receiving") as error:
        weights.send()
    assert set(error.value.engines) == {"http://10.0.0.1:8000"}
    assert trainer.num_gathered == 5
    weights.close()


def test_calls_that_the_settings_do_not_allow_are_told() -> None:
    weights = TrainerWeights(Trainer(), 1, PublishSettings())
    assert weights.highest_version() == 0
    with pytest.raises(TrainerError, match="rank 1: no folder for versions is set"):
        weights.write_version(1, full=True)
    with pytest.raises(TrainerError, match="rank 1: no engine is connected"):
        weights.connect_sender()


def test_a_hook_gets_the_arguments_of_its_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks_after_writing.py").write_text(
        "calls = []\ndef note(args, version_dir, engines):\n    calls.append((args, version_dir, engines))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hooks = importlib.import_module("hooks_after_writing")

    settings = PublishSettings(disk_dir=tmp_path, post_write_hook="hooks_after_writing.note")
    args: Any = object()
    TrainerWeights(Trainer(), 1, settings, hook_args=args).run_post_write_hook("/dir", ["http://10.0.0.1:8000"])
    assert hooks.calls == [(args, "/dir", ["http://10.0.0.1:8000"])]
