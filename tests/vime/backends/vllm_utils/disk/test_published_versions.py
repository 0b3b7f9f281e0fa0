"""Versions on disk: what the trainer writes, and what a host makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vime.backends.vllm_utils.disk.layout import INDEX, highest_version, read_index, version_folder
from vime.backends.vllm_utils.disk.mirror import HostMirror
from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder, weight_names
from vime.errors import PublicationError

Weights = dict[str, torch.Tensor]
FORMATS = [
    DeltaFormat("xor", "xxh3-128"),
    DeltaFormat("overwrite", "blake3"),
    DeltaFormat("overwrite", "adler32"),
]


def first_weights() -> Weights:
    return {f"layer.{i}": torch.randn(40, 30, dtype=torch.bfloat16) for i in range(6)} | {"head": torch.randn(7, 3)}


def changed(weights: Weights, *names: str) -> Weights:
    """A few elements of some tensors, a little larger."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names:
        result[name].view(-1)[::9] *= 1.25
    return result


def held(mirror: HostMirror) -> Weights:
    return dict(read_weight_folder(mirror.folder, weight_names(mirror.folder)))


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
def mirror(tmp_path: Path) -> HostMirror:
    return HostMirror(tmp_path / "local", lock_timeout_s=0.2)


@pytest.fixture
def writer(root: Path) -> VersionWriter:
    return VersionWriter(root, delta=DeltaFormat(), file_bytes=5000)


class TestLayout:
    def test_the_first_version_is_a_whole_checkpoint_that_others_can_load(self, root: Path, tmp_path: Path) -> None:
        source = tmp_path / "checkpoint"
        source.mkdir()
        (source / "config.json").write_text("{}")
        (source / INDEX).write_text("of other files")
        weights = first_weights()
        written = VersionWriter(root, configuration=source, file_bytes=5000).write(1, weights.items())
        folder = root / "weight_v000001"
        index = json.loads((folder / INDEX).read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert len(files) > 1
        assert sorted(set(index["weight_map"].values())) == files
        assert "base_version" not in index["metadata"]
        assert index["metadata"]["total_size"] == written.receipt.num_bytes == written.changed_bytes
        assert (folder / "config.json").exists()
        assert_equal({k: v for file in files for k, v in load_file(folder / file).items()}, weights)
        verify_weight_folder(folder, written.receipt.names, written.receipt.digest)

    def test_a_delta_holds_the_changed_tensors_and_says_what_it_changes(
        self, root: Path, writer: VersionWriter
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        written = writer.write(2, changed(weights, "layer.1", "layer.4").items())
        index = json.loads((root / "weight_v000002" / INDEX).read_text())
        assert index["metadata"] == {
            "version": "000002",
            "base_version": "000001",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        assert set(index["weight_map"]) == {"layer.1", "layer.4"}
        assert written.base_version == 1
        assert 0 < written.density < 0.1
        assert not list(root.glob("*/*.tmp"))

    def test_weights_that_have_not_changed_make_a_version_without_files(
        self, root: Path, writer: VersionWriter, mirror: HostMirror
    ) -> None:
        weights = first_weights()
        for version in (1, 2):
            written = writer.write(version, weights.items())
            mirror.pull(root, version)
        assert (written.wire_bytes, written.density) == (0, 0.0)
        assert_equal(held(mirror), weights)

    def test_the_highest_version_counts_unfinished_folders_too(self, root: Path, writer: VersionWriter) -> None:
        assert highest_version(root) == 0
        writer.write(3, first_weights().items())
        (root / "weight_v000011").mkdir()
        (root / "weight_v0012_old").mkdir()
        assert highest_version(root) == 11

    def test_a_version_is_never_written_over(self, writer: VersionWriter) -> None:
        writer.write(1, first_weights().items())
        with pytest.raises(PublicationError, match="Version 1 of the weights can't be written"):
            writer.write(1, first_weights().items())


class TestPull:
    @pytest.mark.parametrize("format_", FORMATS)
    def test_twenty_deltas_leave_the_copy_equal_bit_for_bit(
        self, root: Path, mirror: HostMirror, format_: DeltaFormat
    ) -> None:
        writer, weights = VersionWriter(root, delta=format_, file_bytes=5000), first_weights()
        for version in range(1, 22):
            written = writer.write(version, weights.items())
            folder = mirror.pull(root, version)
            verify_weight_folder(folder, written.receipt.names, written.receipt.digest)
            assert (written.base_version is None) == (version == 1)
            assert_equal(held(mirror), weights)
            weights = changed(weights, f"layer.{version % 6}")

    def test_a_second_engine_of_the_host_finds_the_work_done(
        self, root: Path, mirror: HostMirror, writer: VersionWriter
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        mirror.pull(root, 1)
        writer.write(2, changed(weights, "head").items())
        for _ in range(2):  # xor must be applied once
            mirror.pull(root, 2)
        assert_equal(held(mirror), changed(weights, "head"))

    def test_a_delta_on_another_version_is_refused_with_both_versions(
        self, root: Path, mirror: HostMirror, writer: VersionWriter
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        mirror.pull(root, 1)
        for version in (2, 3):
            weights = changed(weights, "head")
            writer.write(version, weights.items())
        with pytest.raises(PublicationError, match=r"weight_v000003 changes version 2, .* holds version 1\.") as error:
            mirror.pull(root, 3)
        assert error.value.next_step == "The next publication must be a whole version."
        assert mirror.version == 1

    def test_a_host_without_a_copy_is_refused_a_delta_and_takes_a_whole_version(
        self, root: Path, mirror: HostMirror, writer: VersionWriter
    ) -> None:
        weights = first_weights()
        for version in (1, 2):
            writer.write(version, weights.items())
        with pytest.raises(PublicationError, match=r"changes version 1, .* holds no whole version"):
            mirror.pull(root, 2)
        assert writer.write(3, weights.items(), full=True).base_version is None
        mirror.pull(root, 3)
        assert_equal(held(mirror), weights)

    @pytest.mark.parametrize("kind", ["byte", "short", "missing file", "missing index", "broken index"])
    def test_a_damaged_delta_is_refused_and_a_whole_version_repairs_the_copy(
        self, root: Path, mirror: HostMirror, writer: VersionWriter, kind: str
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        mirror.pull(root, 1)
        weights = changed(weights, "layer.2")
        writer.write(2, weights.items())
        damage(version_folder(root, 2), kind)
        with pytest.raises(PublicationError, match="weight_v000002"):
            mirror.pull(root, 2)
        writer.write(3, weights.items(), full=True)
        mirror.pull(root, 3)
        assert_equal(held(mirror), weights)

    @pytest.mark.parametrize("kind", ["byte", "short", "missing file", "missing index"])
    def test_a_damaged_whole_version_leaves_the_old_copy(
        self, root: Path, mirror: HostMirror, writer: VersionWriter, kind: str
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        mirror.pull(root, 1)
        writer.write(2, changed(weights, "head").items(), full=True)
        damage(version_folder(root, 2), kind)
        with pytest.raises(PublicationError):
            mirror.pull(root, 2)
        assert mirror.version == 1
        assert_equal(held(mirror), weights)

    def test_a_copy_whose_update_was_interrupted_is_refused_a_delta(
        self, root: Path, mirror: HostMirror, writer: VersionWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        mirror.pull(root, 1)
        writer.write(2, changed(weights, "layer.0", "layer.5").items())

        def killed(*_: object) -> str:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("vime.backends.vllm_utils.disk.mirror.checksum", killed)
            with pytest.raises(KeyboardInterrupt):
                mirror.pull(root, 2)
        with pytest.raises(PublicationError, match="holds no whole version"):
            mirror.pull(root, 2)

    def test_a_copy_that_another_process_has_locked_is_told_in_bounded_time(
        self, root: Path, mirror: HostMirror, writer: VersionWriter, tmp_path: Path
    ) -> None:
        from filelock import FileLock

        writer.write(1, first_weights().items())
        (tmp_path / "local").mkdir()
        with (
            FileLock(tmp_path / "local" / "mirror.lock"),
            pytest.raises(PublicationError, match=r"locked by another process for more than 0\.2 s"),
        ):
            mirror.pull(root, 1)


class TestWriter:
    def test_after_a_failure_the_next_version_is_whole(self, writer: VersionWriter) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        with pytest.raises(PublicationError, match="comes twice"):
            writer.write(2, [*weights.items(), ("head", weights["head"])])
        assert writer.write(3, weights.items()).base_version is None

    def test_a_version_that_would_leave_less_than_the_reserve_is_not_begun(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = [1000]  # MiB
        monkeypatch.setattr(
            "vime.backends.vllm_utils.disk.writer.os.statvfs",
            lambda _: os.statvfs_result((2**20, 2**20, 10**9, 0, free[0], 0, 0, 0, 0, 255)),
        )
        writer = VersionWriter(root, reserve_bytes=500 * 2**20)
        weights = {"large": torch.zeros(3 * 2**18)}
        writer.write(1, weights.items())
        free[0] = 502
        with pytest.raises(
            PublicationError, match=r"0\.49 GiB are free, 0\.49 GiB are needed, 0\.49 of them"
        ) as refused:
            writer.write(2, weights.items())
        assert "weight_v000002 is not written" in refused.value.message
        assert highest_version(root) == 1, "nothing was begun"
        free[0] = 504
        writer.write(3, weights.items())

    def test_a_tensor_that_has_gone_or_changed_its_size_is_named(self, writer: VersionWriter) -> None:
        weights = first_weights()
        writer.write(1, weights.items())
        with pytest.raises(PublicationError, match="1 tensors of version 1 are missing now, first head"):
            writer.write(2, [item for item in weights.items() if item[0] != "head"])
        writer.write(3, weights.items())
        with pytest.raises(PublicationError, match=r"Tensor head \(float32\[2, 2\]\) has 16 bytes, 84 before"):
            writer.write(4, (weights | {"head": torch.ones(2, 2)}).items())

    def test_a_removed_version_is_gone(self, root: Path, writer: VersionWriter) -> None:
        writer.write(1, first_weights().items())
        writer.remove(1)
        writer.remove(1)
        assert highest_version(root) == 0

    def test_an_index_of_an_unknown_encoding_is_refused(self, root: Path, writer: VersionWriter) -> None:
        for version in (1, 2):
            writer.write(version, first_weights().items())
        path = version_folder(root, 2) / INDEX
        path.write_text(path.read_text().replace('"xor"', '"bsdiff"'))
        with pytest.raises(PublicationError, match=r"delta encoding 'bsdiff' with compression 'zstd', allowed: xor or"):
            read_index(version_folder(root, 2))


def damage(folder: Path, kind: str) -> None:
    """Spoil the first file of a version, or its index."""
    file, index = min(folder.glob("*.safetensors")), folder / INDEX
    content = bytearray(file.read_bytes())
    if kind == "byte":
        content[-20] ^= 1
        file.write_bytes(content)
    elif kind == "short":
        file.write_bytes(content[:-20])
    elif kind == "missing file":
        file.unlink()
    elif kind == "missing index":
        index.unlink()
    else:
        index.write_text(index.read_text()[:-5])
