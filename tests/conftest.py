"""Settings of the tests that hold for all of them."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Time limits are pytest's: a shared machine makes one example slow now and then.
settings.register_profile("vime", deadline=None)
settings.load_profile("vime")

# Scripts that tests start import what the tests share.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu are skipped where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # takes seconds: not for other tests

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
