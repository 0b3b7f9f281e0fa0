"""Settings of the tests that hold for all of them."""

import os
from pathlib import Path

from hypothesis import settings

# Time limits are pytest's: a shared machine makes one example slow now and then.
settings.register_profile("vime", deadline=None)
settings.load_profile("vime")

# Scripts that tests start import what the tests share.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
