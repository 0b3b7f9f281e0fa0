"""Counting GPUs without CUDA."""

from pathlib import Path

import pytest

from pipeline import devices


@pytest.mark.parametrize(
    ("names", "chosen", "count"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "-1", 0),
        (["nvidiactl"], None, 0),
    ],
)
def test_gpus_are_the_numbered_devices_that_cuda_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], chosen: str | None, count: int
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEVICE_FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert devices.visible_gpus() == count
