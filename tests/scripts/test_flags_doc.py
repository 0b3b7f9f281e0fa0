"""`docs/flags.md` says what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_flag_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_flags_doc.py", "--check"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_flag_reference_marks_what_is_not_built() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    assert "| `--prefill-num-servers` † |" in page
    assert "| `--eps-clip` | `eps_clip` | float: 0 or more | `0.2` |" in page
    assert "## Not built yet" in page
