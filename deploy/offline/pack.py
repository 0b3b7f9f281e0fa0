"""Pack vime and all that it needs for a GPU machine without a network: python -m deploy.offline.pack FOLDER.

The folder gets pieces of at most 58 MB, a manifest with their digests, and `unpack.py`, which installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from deploy.offline import unpack
from deploy.offline.fatbin import keep_architecture
from deploy.offline.layers import ARCHITECTURE, LAYERS, PRESENT, PROJECT, PYTHON, Layer
from vime.errors import SettingsError, VimeError

ROOT = Path(__file__).resolve().parents[2]
PIECE_BYTES = 58 * 10**6
GLIBC_MINORS = (39, 38, 37, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""pip takes a wheel for a manylinux release only when that one is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Pack vime for a GPU machine without a network.")
    parser.add_argument("folder", type=Path, help="where the pieces go")
    parser.add_argument("--layers", default="", help="only these, with commas between them (default: all)")
    parser.add_argument("--wheels", type=Path, help="folder that keeps downloaded wheels for the next time")
    parser.add_argument("--python", default=f"python{dotted(PYTHON)}", help="compiles what has no wheel")
    args = parser.parse_args(argv)
    try:
        pack(args.folder, [name for name in args.layers.split(",") if name], args.wheels, args.python)
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def pack(folder: Path, only: Sequence[str], wheels: Path | None, python: str) -> None:
    """Write the pieces of the layers, all when `only` is empty; other layers in the folder stay as they are.

    Raises `SettingsError` for an unknown layer, and where something can't be downloaded.
    """
    known = {layer.name: layer for layer in LAYERS}
    names = list(only) or [*known, PROJECT]
    unknown = [name for name in names if name not in (*known, PROJECT)]
    if unknown:
        raise SettingsError(
            f"--layers has {', '.join(unknown)}, allowed: {', '.join([*known, PROJECT])}.",
            next_step="Correct the name.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="vime-pack-", dir=folder) as scratch:
            tree = Path(scratch) / name
            tree.mkdir()
            if name == PROJECT:
                _fill_project(tree)
            elif not _fill_layer(known[name], tree, (wheels or Path(scratch)) / f"{name}-wheels", python):
                continue
            add_layer(folder, name, tree)
    shutil.copy(Path(unpack.__file__), folder / "unpack.py")


def add_layer(folder: Path, name: str, tree: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Write `tree` as the pieces of a layer, in place of an earlier one, and enter it in the manifest."""
    for old in folder.glob(f"{name}.tar.xz.*"):
        old.unlink()
    archive = tree.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, path.relative_to(tree), recursive=False, filter=_without_owner)
    subprocess.run(["xz", "-T0", "-6", "--block-size=32MiB", str(archive)], check=True)
    packed = tree.with_suffix(".tar.xz")
    with packed.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        pieces = [_piece(folder, name, number, block) for number, block in enumerate(_blocks(file, piece_bytes))]
    path = folder / unpack.MANIFEST
    layers: dict[str, Any] = json.loads(path.read_text())["layers"] if path.exists() else {}
    layers = {key: value for key, value in layers.items() if key != name} | {name: {"sha256": whole, "pieces": pieces}}
    order = [PROJECT, *(layer.name for layer in LAYERS)]
    manifest = {
        "format": unpack.FORMAT,
        "python": dotted(PYTHON),
        "present": PRESENT,
        "layers": {key: layers[key] for key in sorted(layers, key=order.index)},
    }
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{name}: {sum(piece['bytes'] for piece in pieces) / 1e6:.1f} MB in {len(pieces)} pieces", flush=True)


def _blocks(file: Any, size: int) -> Iterable[bytes]:
    while block := file.read(size):
        yield block


def _piece(folder: Path, layer: str, number: int, content: bytes) -> dict[str, Any]:
    name = f"{layer}.tar.xz.{number:03d}"
    (folder / name).write_bytes(content)
    return {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = "root"
    return member


def _fill_layer(layer: Layer, tree: Path, wheels: Path, python: str) -> bool:
    """Put the packages of a layer into `tree`; False when it needs a compiler that isn't here."""
    wheels.mkdir(parents=True, exist_ok=True)
    if layer.compiles and shutil.which(python) is None:
        print(f"{layer.name}: left out, {python} was not found; --python names one that compiles", flush=True)
        return False
    _fetch(layer, wheels, python)
    for wheel in sorted(wheels.glob("*.whl")):
        install_wheel(wheel, tree)
    for pattern in layer.leave_out:
        for path in list(tree.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library, keep_ptx in layer.gpu_code:
        content = bytearray((tree / library).read_bytes())
        keep_architecture(content, ARCHITECTURE, keep_ptx=keep_ptx)
        (tree / library).write_bytes(content)
    return True


def _fetch(layer: Layer, wheels: Path, python: str) -> None:
    wanted = ["--quiet", "--no-deps", "--requirement", str(layer.requirements)]
    if layer.compiles:
        command = [python, "-m", "pip", "wheel", "--wheel-dir", str(wheels), *wanted]
    else:
        tag = f"cp{PYTHON[0]}{PYTHON[1]}"
        command = [sys.executable, "-m", "pip", "download", "--dest", str(wheels), "--only-binary=:all:", *wanted]
        command += ["--python-version", dotted(PYTHON), "--implementation", "cp"]
        command += [text for abi in (tag, "abi3", "none") for text in ("--abi", abi)]
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
        platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
        command += [text for platform in platforms for text in ("--platform", platform)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-3:]
        raise SettingsError(
            f"The packages of layer {layer.name} can't be had: {' '.join(words)}",
            next_step=f"See {layer.requirements}; --wheels takes a folder of wheels from elsewhere.",
        )


def install_wheel(wheel: Path, tree: Path) -> None:
    """Unpack a wheel as pip would install it: packages in `tree`, commands in `tree/bin`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
        infos = {name.split("/")[0] for name in archive.namelist() if name.split("/")[0].endswith(".dist-info")}
        for member in archive.infolist():
            if (member.external_attr >> 16) & 0o111 and not member.is_dir():
                (tree / member.filename).chmod(0o755)
    (tree / "bin").mkdir(exist_ok=True)
    for data in tree.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, tree, dirs_exist_ok=True)
        for script in (data / "scripts").glob("*"):
            shutil.copy(script, tree / "bin" / script.name)
            (tree / "bin" / script.name).chmod(0o755)
        shutil.rmtree(data)
    for info in infos:
        _write_commands(tree / info / "entry_points.txt", tree / "bin")


def _write_commands(entry_points: Path, folder: Path) -> None:
    parser = ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(entry_points)
    for name, target in parser.items("console_scripts") if parser.has_section("console_scripts") else []:
        module, _, function = target.partition("[")[0].strip().partition(":")
        script = f"#!/usr/bin/env python3\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def _fill_project(tree: Path) -> None:
    """What git tracks, as it is in the working tree, and the metadata by which vLLM finds plug-ins."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        shutil.copytree(tree, source)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", scratch, str(source)], check=True)
        wheel = next(Path(scratch).glob("vime-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if ".dist-info/" in name])
    (tree / "bin").mkdir(exist_ok=True)
    _write_commands(next(tree.glob("vime-*.dist-info")) / "entry_points.txt", tree / "bin")


if __name__ == "__main__":
    raise SystemExit(main())
