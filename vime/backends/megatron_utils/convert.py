"""Checkpoints from one format into another: checked, written tensor by tensor, read back and compared."""

from __future__ import annotations

import ctypes
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.hf_mapping import AttentionShape, attention_shape, split
from vime.backends.megatron_utils.new_folder import new_folder, refuse_existing
from vime.backends.megatron_utils.open_weights import open_weights
from vime.backends.megatron_utils.safetensors_files import RECORD, bytes_of, write_checkpoint
from vime.backends.megatron_utils.skeleton import Skeleton, open_skeleton
from vime.backends.megatron_utils.weight_reader import HuggingFaceReader, WeightReader, num_stored_further_layers
from vime.backends.megatron_utils.weight_source import TRACKER, WeightSource
from vime.errors import CorruptDataError, ModelError, SettingsError
from vime.models.weight_names import WeightRule

from vime.backends.megatron_utils import checkpoint_writer, probe  # isort: skip  # Megatron, after its repairs

Format = Literal["hf", "torch_dist", "torch"]
RELEASE = "release"
"""Megatron's name for a checkpoint that no training has reached."""
MOST_DIFFERENCE = 1e-4
"""Between logits of the two checkpoints, in float32, relative to the largest logit."""
_ROOM = 64 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h
Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many parameters are."""


@dataclass(frozen=True)
class Conversion:
    """What to convert into what."""

    source: WeightSource
    target: Path
    to: Format
    hf_checkpoint: Path
    """Folder with `config.json` and tokenizer; the source itself when that is a Hugging Face folder."""
    checks_logits: bool = True
    model_name: str | None = None
    """Family of the model, where `config.json` names another type; see `families.family_named`."""


@dataclass(frozen=True)
class Converted:
    """What was converted, as the record in the target says it."""

    source: str
    format: Format
    num_tensors: int
    num_bytes: int
    digest: str
    """XXH3-128 over names, dtypes, shapes and numbers of all Hugging Face tensors but copies: equal models have one."""
    logits_relative_difference: float | None
    """Largest difference on the probe's tokens, relative to the largest logit; None where it wasn't asked for."""


def convert(conversion: Conversion, progress: Progress) -> Converted:
    """Convert, and compare the target with the source.

    Memory holds a few layers, whatever the size of the model. The target appears under its name when it is whole and
    has been compared; until then, and after any error, there is nothing.

    Raises:
        SettingsError: the target exists, or source and target have the same format.
        ModelError, RestoreError: the source can't be read, or doesn't fit `config.json`.
        DiskFullError: there is too little space.
        CorruptDataError: the target is not what was written.
    """
    refuse_existing(conversion.target)
    _return_freed_memory()
    hf_config = read_hf_config(conversion.hf_checkpoint, conversion.model_name)
    if conversion.source.is_hugging_face and conversion.to == "hf":
        raise SettingsError(
            f"{conversion.source.directory} is a Hugging Face folder already.",
            next_step="Give --to torch_dist or torch.",
        )
    with (
        open_weights(conversion.source, hf_config) as reader,
        _open_skeleton(conversion.hf_checkpoint, hf_config, reader) as skeleton,
    ):
        reader.check_names(skeleton.rules)
        if isinstance(reader, HuggingFaceReader):
            reader.refuse_further_layers(skeleton.rules)
        num_bytes = _check_shapes(reader, skeleton)
        if conversion.source.is_hugging_face:
            _check_copies(reader, skeleton.rules)
        with new_folder(conversion.target, num_bytes + num_bytes // 50 + _ROOM) as folder:
            job = _Job(conversion, hf_config, skeleton, reader, progress)
            return job.run(folder, num_bytes)


@contextmanager
def _open_skeleton(hf_checkpoint: Path, hf_config: Mapping[str, Any], reader: WeightReader) -> Iterator[Skeleton]:
    """With the layers for further tokens that the source holds, and the copies of weights that it has beside them."""
    with open_skeleton(hf_checkpoint, hf_config, num_stored_further_layers(reader, hf_config)) as skeleton:
        yield replace(skeleton, rules=[rule for rule in skeleton.rules if not rule.is_copy or reader.has(rule)])


def _return_freed_memory() -> None:
    """Let glibc give each freed tensor back at once; by default it keeps those below 32 MiB, and they pile up."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _check_shapes(reader: WeightReader, skeleton: Skeleton) -> int:
    """Bytes of all weights. Raises `ModelError` naming what has another shape than `config.json` says."""
    total = 0
    wrong = []
    for rule in skeleton.rules:
        found, wanted = reader.shape(rule), skeleton.shape(rule)
        is_padded = rule.is_vocabulary and len(found) == len(wanted) and found[0] >= wanted[0]
        if found != wanted and not (is_padded and found[1:] == wanted[1:]):
            wrong.append(f"{', '.join(rule.hf_names)}: {list(found)}, allowed: {list(wanted)}")
        total += math.prod(wanted) * reader.dtype(rule).itemsize
    if wrong:
        raise ModelError(
            f"{reader.place}: shapes differ from those of config.json: {'; '.join(wrong[:8])}.",
            next_step="Check that config.json belongs to these weights.",
        )
    return total


def _check_copies(reader: WeightReader, rules: Sequence[WeightRule]) -> None:
    """Raise `ModelError` naming tensors that are no copies of those whose copies they should be."""
    originals = {rule.megatron_name: rule for rule in rules if not rule.is_copy}
    for rule in rules:
        original = originals[rule.megatron_name]
        if rule.is_copy and not (
            reader.dtype(rule) == reader.dtype(original) and torch.equal(reader.read(rule), reader.read(original))
        ):
            raise ModelError(
                f"{reader.place}: {', '.join(rule.hf_names)} differs from {', '.join(original.hf_names)}, allowed: the "
                "same numbers; Megatron's model has them once.",
                next_step="Check that the files belong to one checkpoint.",
            )


class _Job:
    def __init__(
        self,
        conversion: Conversion,
        hf_config: Mapping[str, Any],
        skeleton: Skeleton,
        reader: WeightReader,
        progress: Progress,
    ) -> None:
        self._conversion, self._hf_config, self._skeleton = conversion, hf_config, skeleton
        self._reader, self._progress = reader, progress
        self._attention = attention_shape(hf_config)

    def run(self, folder: Path, num_bytes: int) -> Converted:
        written = _Digests(self._attention)
        self._write(folder, written)
        difference = None
        with open_weights(WeightSource("the target", folder), self._hf_config) as target:
            self._compare(target, written)
            if self._conversion.checks_logits:
                difference = self._compare_logits(folder, target)
        converted = Converted(
            source=str(self._reader.place),
            format=self._conversion.to,
            num_tensors=len(written.of_tensor),
            num_bytes=num_bytes,
            digest=written.whole(),
            logits_relative_difference=difference,
        )
        (folder / RECORD).write_text(json.dumps(asdict(converted), indent=1))
        return converted

    def _write(self, folder: Path, digests: _Digests) -> None:
        weights = self._read(self._reader, "converting", digests)
        if self._conversion.to == "hf":
            named = (pair for rule, full in weights for pair in _hf_tensors(rule, full, self._attention))
            write_checkpoint(named, self._conversion.hf_checkpoint, folder)
            return
        own = (pair for pair in weights if not pair[0].is_copy)
        release = folder / RELEASE
        release.mkdir()
        if self._conversion.to == "torch_dist":
            checkpoint_writer.write_torch_dist(release, self._skeleton, own, 0)
        else:
            rules = [rule for rule in self._skeleton.rules if not rule.is_copy]
            dtypes = {rule.megatron_name: self._reader.dtype(rule) for rule in rules}
            checkpoint_writer.write_torch(release, self._skeleton, own, dtypes, 0)
        (folder / TRACKER).write_text(RELEASE)

    def _compare(self, target: WeightReader, written: _Digests) -> None:
        target.check_names(self._skeleton.rules)
        found = _Digests(self._attention)
        for _ in self._read(target, "comparing", found):
            pass
        wrong = [name for name, digest in written.of_tensor.items() if found.of_tensor.get(name) != digest]
        if wrong:
            raise CorruptDataError(
                f"{self._conversion.target}: {', '.join(wrong[:8])} read back differ from what was written.",
                next_step="Check the disk and convert again; nothing was kept.",
            )

    def _compare_logits(self, folder: Path, target: WeightReader) -> float:
        self._progress("comparing logits", 0, 1)
        tokens = probe.probe_tokens(int(self._hf_config["vocab_size"]))
        source = self._conversion.source
        of_target = probe.megatron_logits(
            self._skeleton, self._reader if self._conversion.to == "hf" else target, tokens
        )
        if self._conversion.to == "hf":
            expected = probe.hugging_face_logits(folder, self._hf_config, tokens)
        elif source.is_hugging_face:
            expected = probe.hugging_face_logits(source.directory, self._hf_config, tokens)
        else:
            expected = probe.megatron_logits(self._skeleton, self._reader, tokens)
        difference = probe.relative_difference(of_target, expected)
        self._progress("comparing logits", 1, 1)
        if not difference <= MOST_DIFFERENCE:
            raise CorruptDataError(
                f"{self._conversion.target}: logits differ by {difference:.1e} of the largest from those of "
                f"{self._reader.place}, allowed: {MOST_DIFFERENCE:.0e}.",
                next_step="Check that config.json belongs to these weights; nothing was kept.",
            )
        return difference

    def _read(self, reader: WeightReader, doing: str, digests: _Digests) -> Iterator[tuple[WeightRule, torch.Tensor]]:
        rules = self._skeleton.rules
        for number, rule in enumerate(rules):
            full = reader.read(rule)
            digests.add(rule, full)
            yield rule, full
            self._progress(doing, number + 1, len(rules))


class _Digests:
    """Digest of each Hugging Face tensor."""

    def __init__(self, attention: AttentionShape) -> None:
        self._attention = attention
        self.of_tensor: dict[str, str] = {}
        self._copies: set[str] = set()

    def add(self, rule: WeightRule, full: torch.Tensor) -> None:
        for name, tensor in _hf_tensors(rule, full, self._attention):
            head = f"{name} {tensor.dtype} {list(tensor.shape)} ".encode()
            digest = xxhash.xxh3_128(head)
            digest.update(bytes_of(tensor))
            self.of_tensor[name] = digest.hexdigest()
            if rule.is_copy:
                self._copies.add(name)

    def whole(self) -> str:
        digests = " ".join(self.of_tensor[name] for name in sorted(self.of_tensor.keys() - self._copies))
        return xxhash.xxh3_128_hexdigest(digests.encode())


def _hf_tensors(rule: WeightRule, full: torch.Tensor, attention: AttentionShape) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(rule.hf_names, split(rule, full, attention), strict=True)
