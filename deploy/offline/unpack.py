"""Install a packed vime on a machine without a network: python3 unpack.py [--pieces DIR] [--target DIR].

Standard library only, so that this one file and the pieces are all that has to be carried there. What is installed
already is left as it is; what an interruption left is done again.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import importlib.metadata
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

MANIFEST = "manifest.json"
FORMAT = 1
STAMP = ".installed"
"""In a layer's folder: the digest of the archive that it came from."""
BLOCK = 2**20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What vLLM has without the packages that are not packed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class UnpackError(Exception):
    """What is wrong with the pieces or the machine, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when everything asked for is installed."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Install a packed vime from its pieces.")
    parser.add_argument("--pieces", type=Path, default=here, help="folder with manifest.json and the pieces")
    parser.add_argument("--target", type=Path, default=Path("/opt/vime"), help="where to install (default /opt/vime)")
    parser.add_argument("--layers", default="", help="only these, with commas between them (default: all)")
    parser.add_argument("--no-machine-check", action="store_true", help="install on another machine than it is for")
    args = parser.parse_args(argv)
    try:
        manifest = read_manifest(args.pieces)
        if not args.no_machine_check:
            check_machine(manifest)
        for name in chosen_layers(manifest, args.layers):
            done = install_layer(manifest["layers"][name], name, args.pieces, args.target)
            print(f"{name}: {'installed' if done else 'is installed already'}", flush=True)
        print(f"Now: . {write_environment(manifest, args.target)}")
    except UnpackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_manifest(pieces: Path) -> dict[str, Any]:
    """What was packed; raises `UnpackError` without one."""
    path = pieces / MANIFEST
    if not path.is_file():
        raise UnpackError(f"{path} is missing. Copy it here; the pack command wrote it beside the pieces.")
    manifest: dict[str, Any] = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise UnpackError(
            f"{path} has format {manifest.get('format')}, allowed: {FORMAT}. Use the unpack.py beside it."
        )
    return manifest


def check_machine(manifest: dict[str, Any]) -> None:
    """Raise `UnpackError` naming everything that the packed things stand on and that isn't here."""
    wrong = []
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found != manifest["python"]:
        wrong.append(f"Python is {found}, allowed: {manifest['python']}")
    for package, allowed in manifest["present"].items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package} is not installed")
            continue
        if allowed and allowed not in (version, version.partition("+")[0]):
            wrong.append(f"{package} is {version}, allowed: {allowed}")
    if wrong:
        raise UnpackError(f"This machine lacks what was not packed: {'; '.join(wrong)}. Use an image that has it.")


def chosen_layers(manifest: dict[str, Any], names: str) -> list[str]:
    """The layers named, all by default; raises `UnpackError` for a name that was not packed."""
    wanted = [name for name in names.split(",") if name] or list(manifest["layers"])
    unknown = [name for name in wanted if name not in manifest["layers"]]
    if unknown:
        raise UnpackError(f"--layers has {', '.join(unknown)}, allowed: {', '.join(manifest['layers'])}.")
    return wanted


def install_layer(layer: dict[str, Any], name: str, pieces: Path, target: Path) -> bool:
    """Put a layer into `target/name`, whole or not at all; False when it is there already."""
    folder, partial = target / name, target / f".{name}.partial"
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == layer["sha256"]:
        return False
    check_pieces(layer["pieces"], name, pieces)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parts = [pieces / piece["name"] for piece in layer["pieces"]]
    with _decompressed(parts) as content, tarfile.open(fileobj=content, mode="r|") as archive:
        archive.extractall(partial, filter="tar")
    # Every process of a run imports thousands of modules; where bytecode isn't kept each would compile them anew.
    compileall.compile_dir(partial, quiet=2, workers=0, stripdir=partial, prependdir=folder)
    (partial / STAMP).write_text(layer["sha256"])
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return True


def check_pieces(expected: Sequence[dict[str, Any]], layer: str, folder: Path) -> None:
    """Raise `UnpackError` naming every piece of a layer that is missing or damaged."""
    missing = [piece["name"] for piece in expected if not (folder / piece["name"]).is_file()]
    if missing:
        raise UnpackError(
            f"{', '.join(missing)} of layer {layer} (of {len(expected)} in all) is missing in {folder}. "
            "Copy it there and start again; what is installed stays."
        )
    for piece in expected:
        digest = _sha256(folder / piece["name"])
        if digest != piece["sha256"]:
            raise UnpackError(
                f"{folder / piece['name']} has SHA-256 {digest}, allowed: {piece['sha256']}. Copy it again."
            )


def write_environment(manifest: dict[str, Any], target: Path) -> Path:
    """The file to source: import path, commands and variables for what is installed in `target`."""
    folders = [target / name for name in manifest["layers"] if (target / name / STAMP).is_file()]
    lines = [f"export {name}={value}" for name, value in ENVIRONMENT.items()]
    lines.append(f"export PYTHONPATH={':'.join(map(str, folders))}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines.append(f"export PATH={':'.join(str(folder / 'bin') for folder in folders)}:$PATH")
    lines.append("unset PYTHONDONTWRITEBYTECODE")  # or every process compiles all that it imports
    path = target / "env.sh"
    path.write_text("\n".join(lines) + "\n")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _decompressed(pieces: Sequence[Path]) -> Iterator[IO[bytes]]:
    """The tar archive that the pieces hold, by the `xz` program where there is one: it uses all cores."""
    program = shutil.which("xz")
    if program is None:
        yield io.BufferedReader(_Decompressor(pieces), BLOCK)
        return
    cat = subprocess.Popen(["cat", *map(str, pieces)], stdout=subprocess.PIPE)
    xz = subprocess.Popen([program, "-dc", "-T0"], stdin=cat.stdout, stdout=subprocess.PIPE)
    if cat.stdout is None or xz.stdout is None:
        raise UnpackError("No pipe could be made.")
    cat.stdout.close()
    try:
        yield xz.stdout
        xz.stdout.read()
    finally:
        xz.stdout.close()
        statuses = [cat.wait(), xz.wait()]
    if any(statuses):
        raise UnpackError(f"cat and xz ended with status {statuses}: copy the pieces again.")


class _Decompressor(io.RawIOBase):
    """A readable stream of what the pieces hold, in this process."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._blocks, self._left = self._decompress(pieces), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = block
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)

    @staticmethod
    def _decompress(pieces: Sequence[Path]) -> Iterator[bytes]:
        decoder = lzma.LZMADecompressor()
        for piece in pieces:
            with piece.open("rb") as file:
                while block := file.read(BLOCK):
                    while not decoder.eof:
                        out = decoder.decompress(block, BLOCK)
                        yield out
                        block = b""
                        if decoder.needs_input:
                            break


if __name__ == "__main__":
    raise SystemExit(main())
