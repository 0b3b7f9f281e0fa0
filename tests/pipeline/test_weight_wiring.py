"""Which weights an engine on a GPU receives beside its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.weight_wiring import BESIDE_BYTES, fits_beside, trainer_weights
from tests.pipeline.test_trainer_weights import Trainer
from vime.errors import PublicationError
from vime.settings.parse import parse_settings


@pytest.mark.parametrize(("sizes", "fits"), [([], False), ([BESIDE_BYTES], True), ([BESIDE_BYTES, 1], False)])
def test_only_a_checkpoint_of_known_size_up_to_the_limit_fits_beside_a_model(
    tmp_path: Path, sizes: list[int], fits: bool
) -> None:
    for number, size in enumerate(sizes):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)  # takes no space
    assert fits_beside(tmp_path) is fits


def test_versions_on_disk_leave_the_reserve_of_the_settings_free(tmp_path: Path) -> None:
    words = ["--update-weight-disk-dir", str(tmp_path / "versions"), "--rollout-disk-reserve-gib", "1e9"]
    weights = trainer_weights(parse_settings([*words, "--save", str(tmp_path / "run")]), Trainer(), 0)
    with pytest.raises(PublicationError, match=r"weight_v000001 is not written: .* 1000000000\.00 GiB are needed"):
        weights.write_version(1, full=True)
