"""Which weights an engine on a GPU receives beside its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.weight_wiring import BESIDE_BYTES, fits_beside


@pytest.mark.parametrize(("sizes", "fits"), [([], False), ([BESIDE_BYTES], True), ([BESIDE_BYTES, 1], False)])
def test_only_a_checkpoint_of_known_size_up_to_the_limit_fits_beside_a_model(
    tmp_path: Path, sizes: list[int], fits: bool
) -> None:
    for number, size in enumerate(sizes):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)  # takes no space
    assert fits_beside(tmp_path) is fits
