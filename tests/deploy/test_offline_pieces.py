"""Pieces of a packed vime, and what a machine without a network makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.offline import unpack
from deploy.offline.layers import LAYERS, PYTHON
from deploy.offline.pack import add_layer, install_wheel
from vime import versions

PIECE_BYTES = 1000


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Two layers in small pieces; `engine` has several."""
    for name, content in (("engine", os.urandom(2500)), ("stream", b"queue")):
        tree = tmp_path / "trees" / name
        (tree / "bin").mkdir(parents=True)
        (tree / f"{name}.bin").write_bytes(content)
        (tree / "bin" / f"use-{name}").write_text("#!/bin/sh\necho used\n")
        (tree / "bin" / f"use-{name}").chmod(0o755)
        (tmp_path / "pieces").mkdir(exist_ok=True)
        add_layer(tmp_path / "pieces", name, tree, PIECE_BYTES)
    return tmp_path / "pieces"


def install(pieces: Path, target: Path, *more: str) -> int:
    return unpack.main(["--pieces", str(pieces), "--target", str(target), "--no-machine-check", *more])


@pytest.mark.parametrize("has_xz", [True, False])
def test_what_was_packed_is_installed_with_its_commands(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_xz: bool
) -> None:
    if not has_xz:
        monkeypatch.setattr(unpack.shutil, "which", lambda _: None)
    assert install(packed, tmp_path / "target") == 0
    assert (tmp_path / "target/engine/engine.bin").read_bytes() == (tmp_path / "trees/engine/engine.bin").read_bytes()
    sourced = subprocess.run(
        ["sh", "-c", f". {tmp_path}/target/env.sh; use-stream; echo $PYTHONPATH"],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": "/own"},
    )
    assert sourced.stdout.split() == ["used", f"{tmp_path}/target/engine:{tmp_path}/target/stream:/own"]


def test_every_missing_piece_is_named_and_the_rest_can_be_brought_later(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 2):
        (packed / f"engine.tar.xz.{number:03d}").rename(tmp_path / f"kept{number}")
    assert install(packed, tmp_path / "target") == 1
    assert (
        "error: engine.tar.xz.000, engine.tar.xz.002 of layer engine (of 3 in all) is missing"
        in capsys.readouterr().err
    )
    assert install(packed, tmp_path / "target", "--layers", "stream") == 0
    for number in (0, 2):
        (tmp_path / f"kept{number}").rename(packed / f"engine.tar.xz.{number:03d}")
    assert install(packed, tmp_path / "target") == 0
    assert "stream: is installed already" in capsys.readouterr().out


def test_damaged_piece_is_named_and_nothing_of_its_layer_is_installed(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piece = packed / "engine.tar.xz.001"
    content = bytearray(piece.read_bytes())
    content[500] ^= 1
    piece.write_bytes(content)
    assert install(packed, tmp_path / "target") == 1
    assert f"error: {piece} has SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "target/engine").exists()


def test_second_unpack_changes_nothing(packed: Path, tmp_path: Path) -> None:
    install(packed, tmp_path / "target")
    (tmp_path / "target/engine/engine.bin").write_text("mine")
    assert install(packed, tmp_path / "target") == 0
    assert (tmp_path / "target/engine/engine.bin").read_text() == "mine"


def test_interrupted_unpack_and_older_version_are_replaced(packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / ".engine.partial").mkdir(parents=True)
    (target / ".engine.partial/half").touch()
    (target / "engine").mkdir()
    (target / "engine/old").touch()
    (target / "engine/.installed").write_text("digest of an older pack")
    assert install(packed, target) == 0
    assert sorted(path.name for path in (target / "engine").iterdir()) == [".installed", "bin", "engine.bin"]


def test_layer_packed_again_with_fewer_pieces_leaves_no_old_piece(packed: Path, tmp_path: Path) -> None:
    tree = tmp_path / "smaller"
    tree.mkdir()
    (tree / "engine.bin").write_bytes(b"x")
    add_layer(packed, "engine", tree, PIECE_BYTES)
    assert [path.name for path in packed.glob("engine.*")] == ["engine.tar.xz.000"]
    assert sorted(json.loads((packed / "manifest.json").read_text())["layers"]) == ["engine", "stream"]


def test_machine_without_what_was_not_packed_is_refused_with_all_that_it_lacks(packed: Path) -> None:
    manifest = unpack.read_manifest(packed) | {
        "python": "2.7",
        "present": {"no-such-package": "", "pytest": "0.1", "msgspec": ""},
    }
    with pytest.raises(unpack.UnpackError) as error:
        unpack.check_machine(manifest)
    assert "Python is 3." in str(error.value)
    assert "no-such-package is not installed; pytest is " in str(error.value)
    assert "msgspec" not in str(error.value)


def test_unpack_needs_nothing_but_python(packed: Path, tmp_path: Path) -> None:
    script = tmp_path / "unpack.py"
    script.write_bytes(Path(unpack.__file__).read_bytes())
    command = [sys.executable, "-I", "-S", str(script), "--pieces", str(packed), "--target", str(tmp_path / "target")]
    subprocess.run([*command, "--no-machine-check"], check=True, capture_output=True)
    assert (tmp_path / "target/stream/stream.bin").read_bytes() == b"queue"


def test_wheel_gets_its_packages_scripts_and_commands(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("one/__init__.py", "def main():\n    print('hello')\n")
        archive.writestr("one-1.0.data/purelib/two.py", "")
        program = zipfile.ZipInfo("one/program")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr("one-1.0.data/scripts/three", "#!/bin/sh\n")
        archive.writestr("one-1.0.dist-info/entry_points.txt", "[console_scripts]\nSay-it = one:main\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    install_wheel(wheel, tree)
    assert (tree / "two.py").exists()
    assert os.access(tree / "bin/three", os.X_OK)
    assert os.access(tree / "one/program", os.X_OK)
    assert not os.access(tree / "one/__init__.py", os.X_OK)
    said = subprocess.run(
        [sys.executable, tree / "bin/Say-it"], env={"PYTHONPATH": str(tree)}, check=True, capture_output=True
    )
    assert said.stdout == b"hello\n"


def test_packed_versions_are_those_that_go_together() -> None:
    pinned = dict(
        line.lower().split("==")
        for layer in LAYERS
        for line in layer.requirements.read_text().splitlines()
        if not line.startswith("#")
    )
    wanted = {name: version for name, version in versions.GPU.packages.items() if name != "torch"}
    assert {name: pinned.get(name) for name in wanted} == wanted
    assert versions.GPU.python == PYTHON
