"""`WeightReader` for Megatron's two checkpoint formats, saved under any parallel layout."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from vime.backends.megatron_utils.hf_mapping import merge_shards
from vime.backends.megatron_utils.torch_dist_files import TorchDistReader
from vime.backends.megatron_utils.torch_files import RankFile
from vime.backends.megatron_utils.weight_reader import check_names
from vime.backends.megatron_utils.weight_source import MODEL_FILE
from vime.counted import counted
from vime.errors import ModelError
from vime.models.weight_names import WeightRule, num_further_layers

_OTHER_NAMES = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
    "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
    "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
}
"""Names of norms that a model built with Transformer Engine fuses into the projection behind them."""
_INNER = "mtp_model_layer."
"""What the names of the usual parts of a layer for further tokens begin with, in the model."""
_INNER_STORED = "transformer_layer."
"""The same in checkpoints of the `torch_dist` format."""
_FURTHER_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_NO_WEIGHT = re.compile(r"^(optimizer|chained_\d+\.optimizer|rng_state|rerun_state)|_extra_state")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")


def names_in_layer(rule: WeightRule) -> tuple[str, ...]:
    """Names of a parameter without its layer's prefix, the usual one first."""
    name = rule.megatron_name.removeprefix(rule.layer_prefix).removeprefix(_INNER)
    return (name, *_OTHER_NAMES.get(name, ()))


@dataclass(frozen=True)
class _Entry:
    """Where a `torch_dist` checkpoint keeps a parameter: a tensor, and where in its leading dimensions."""

    key: str
    index: tuple[int, ...]


class TorchDistWeights:
    """A folder in the `torch_dist` format."""

    def __init__(self, folder: Path, hf_config: Mapping[str, Any]) -> None:
        self.place = folder
        self._files = TorchDistReader(folder)
        self._keys = self._files.tensor_keys
        self._vocab_size = int(hf_config["vocab_size"])
        self._num_further = num_further_layers(hf_config)

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    def check_names(self, rules: Sequence[WeightRule]) -> None:
        entries = {rule.megatron_name: self._find(rule) for rule in rules}
        known = {entry.key for entry in entries.values() if entry is not None}
        unexpected = {key for key in self._keys - known if not _NO_WEIGHT.search(key)}
        unexpected = {key for key in unexpected if not _is_of_a_known_depth(key, self._num_further)}
        found = {name for name, entry in entries.items() if entry is not None}
        check_names(self.place, entries, found | unexpected)
        self._check_leading_sizes([entry for entry in entries.values() if entry is not None and entry.index])

    def has(self, rule: WeightRule) -> bool:
        return self._find(rule) is not None

    def shape(self, rule: WeightRule) -> tuple[int, ...]:
        entry = self._found(rule)
        return self._files.shape(entry.key)[len(entry.index) :]

    def dtype(self, rule: WeightRule) -> torch.dtype:
        return self._files.dtype(self._found(rule).key)

    def read(self, rule: WeightRule) -> torch.Tensor:
        entry, shape = self._found(rule), list(self.shape(rule))
        if rule.is_vocabulary:
            shape[0] = min(shape[0], self._vocab_size)
        leading = len(entry.index)
        part = self._files.read(entry.key, (*entry.index, *[0] * len(shape)), ([1] * leading) + shape)
        return part.reshape(shape)

    def _found(self, rule: WeightRule) -> _Entry:
        entry = self._find(rule)
        if entry is None:
            raise ModelError(f"{self.place}: missing weights: {rule.megatron_name}.")
        return entry

    def _find(self, rule: WeightRule) -> _Entry | None:
        return next((entry for entry in _entries(rule) if entry.key in self._keys), None)

    def _check_leading_sizes(self, entries: list[_Entry]) -> None:
        """A checkpoint with more layers or experts than the model has would otherwise be read in part."""
        largest: dict[str, tuple[int, ...]] = {}
        for entry in entries:
            seen = largest.get(entry.key, entry.index)
            largest[entry.key] = tuple(max(pair) for pair in zip(seen, entry.index, strict=True))
        for key, last in largest.items():
            sizes = self._files.shape(key)[: len(last)]
            if sizes != tuple(number + 1 for number in last):
                raise ModelError(
                    f"{self.place}: {key} holds {' x '.join(map(str, sizes))} layers or experts, allowed: "
                    f"{' x '.join(str(number + 1) for number in last)}.",
                    next_step="Check that config.json belongs to these weights.",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _is_of_a_known_depth(name: str, num_further: int) -> bool:
    """Whether a parameter belongs to one of the model's layers for further tokens, which a trainer may leave out."""
    match = _FURTHER_LAYER.match(name)
    return match is not None and int(match[1]) < num_further


def _entries(rule: WeightRule) -> Iterator[_Entry]:
    """Where the parameter may be: under its layer's number, or in a tensor over all layers; experts are in one."""
    if rule.layer is None:
        yield _Entry(rule.megatron_name, ())
        return
    expert = () if rule.expert is None else (rule.expert,)
    for name in names_in_layer(rule):
        shared = re.sub(r"\.local_experts\.\d+\.", ".experts.", name)
        if rule.layer_prefix.startswith("mtp."):
            inner = _INNER_STORED if f".{_INNER}" in rule.megatron_name else ""
            yield _Entry(f"{rule.layer_prefix}{inner}{shared}", expert)
            continue
        yield _Entry(f"decoder.layers.{rule.layer}.{shared}", expert)
        yield _Entry(f"decoder.layers.{shared}", (rule.layer, *expert))


@dataclass(frozen=True)
class _Ranks:
    """A file's place among those of the checkpoint."""

    tensor: int
    pipeline: int
    expert: int


class TorchWeights:
    """A folder in the `torch` format: a file for each rank of the model."""

    def __init__(self, folder: Path, hf_config: Mapping[str, Any]) -> None:
        """Read what all files say of their tensors. Raises `ModelError` for an absent file or a layout."""
        self.place = folder
        self._vocab_size = int(hf_config["vocab_size"])
        self._num_further = num_further_layers(hf_config)
        self._stack = contextlib.ExitStack()
        try:
            self._files = self._open_all()
            self._shards = self._collect()
        except BaseException:
            self._stack.close()
            raise

    @property
    def num_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self._files.values())

    def check_names(self, rules: Sequence[WeightRule]) -> None:
        wanted = {self._name(rule) or rule.megatron_name for rule in rules}
        found = {name for name in self._shards if name in wanted or not _is_of_a_known_depth(name, self._num_further)}
        # The last pipeline stage keeps a copy of a tied embedding as its head.
        copies = {"output_layer.weight"} - {rule.megatron_name for rule in rules}
        check_names(self.place, wanted, found - copies)

    def has(self, rule: WeightRule) -> bool:
        return self._name(rule) is not None

    def shape(self, rule: WeightRule) -> tuple[int, ...]:
        shards = [torch.empty(like.shape, device="meta") for _, like in self._shards_of(rule)]
        return tuple(merge_shards(rule, shards).shape)

    def dtype(self, rule: WeightRule) -> torch.dtype:
        return self._shards_of(rule)[0][1].dtype

    def read(self, rule: WeightRule) -> torch.Tensor:
        full = merge_shards(rule, [file.read(like) for file, like in self._shards_of(rule)])
        return full[: self._vocab_size] if rule.is_vocabulary else full

    def _shards_of(self, rule: WeightRule) -> list[tuple[RankFile, torch.Tensor]]:
        name = self._name(rule)
        if name is None:
            raise ModelError(f"{self.place}: missing weights: {rule.megatron_name}.")
        by_rank = self._shards[name]
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _name(self, rule: WeightRule) -> str | None:
        prefix = rule.layer_prefix + (_INNER if f".{_INNER}" in rule.megatron_name else "")
        return next((prefix + name for name in names_in_layer(rule) if prefix + name in self._shards), None)

    def _open_all(self) -> dict[_Ranks, RankFile]:
        paths = sorted(self.place.glob(f"mp_rank_*/{MODEL_FILE}"))
        first = self._stack.enter_context(RankFile(paths[0]))
        args = first.state["args"]
        has_pipeline, has_experts = args.pipeline_model_parallel_size > 1, args.expert_model_parallel_size > 1
        expert_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        if args.num_experts and expert_size not in (1, args.tensor_model_parallel_size):
            raise ModelError(
                f"{self.place}: --expert-tensor-parallel-size {expert_size} of --tensor-model-parallel-size "
                f"{args.tensor_model_parallel_size}, allowed in the torch format: 1, or as many.",
                next_step="Save the checkpoint in the torch_dist format.",
            )
        files = {}
        for path in paths:
            match = _RANK_FOLDER.fullmatch(path.parent.name)
            if match is None:
                raise ModelError(f"{path.parent} is not a folder of one rank, allowed: mp_rank_TT[_PPP][_EEE].")
            numbers = [int(number) for number in match.groups() if number is not None]
            ranks = _Ranks(
                numbers[0], numbers[1] if has_pipeline else 0, numbers[-1] if has_experts and len(numbers) > 1 else 0
            )
            files[ranks] = first if path == paths[0] else self._stack.enter_context(RankFile(path))
        self._check_complete(files, args)
        return files

    def _check_complete(self, files: Mapping[_Ranks, RankFile], args: Any) -> None:
        found = {(ranks.tensor, ranks.pipeline) for ranks in files}
        wanted = {
            (tensor, pipeline)
            for tensor in range(args.tensor_model_parallel_size)
            for pipeline in range(args.pipeline_model_parallel_size)
        }
        if found != wanted or len({ranks.expert for ranks in files}) != args.expert_model_parallel_size:
            raise ModelError(
                f"{self.place} has the files of {counted(len(files), 'rank')}, not all of tensor x pipeline x expert "
                f"parallel sizes {args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x "
                f"{args.expert_model_parallel_size}.",
                next_step="Copy the missing folders.",
            )

    def _collect(self) -> dict[str, dict[int, tuple[RankFile, torch.Tensor]]]:
        """Name in the whole model -> shard number -> where it is."""
        shards: dict[str, dict[int, tuple[RankFile, torch.Tensor]]] = {}
        first_layer = _first_layers(self._files)
        for ranks, file in self._files.items():
            for chunk, state in _chunks(file):
                for name, like in state.items():
                    if not isinstance(like, torch.Tensor) or _NO_WEIGHT.search(name):
                        continue
                    whole = _renumbered(r"^(decoder\.layers\.)(\d+)", name, first_layer[ranks.pipeline, chunk])
                    whole = _renumbered(r"(\.local_experts\.)(\d+)", whole, _first_expert(file, ranks))
                    is_cut = ".local_experts." not in whole or _expert_shards(file) > 1
                    shards.setdefault(whole, {})[ranks.tensor if is_cut else 0] = (file, like)
        return shards

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _chunks(file: RankFile) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number and state of each virtual pipeline stage in a file."""
    if "model" in file.state:
        yield 0, file.state["model"]
    for key, state in file.state.items():
        if match := re.fullmatch(r"model(\d+)", key):
            yield int(match[1]), state


def _first_layers(files: Mapping[_Ranks, RankFile]) -> dict[tuple[int, int], int]:
    """First layer of each (pipeline rank, virtual stage): stages come in the order of the layers."""
    counts: dict[tuple[int, int], int] = {}
    for ranks, file in files.items():
        for chunk, state in _chunks(file):
            numbers = {match[1] for name in state if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}
            counts[chunk, ranks.pipeline] = len(numbers)
    first, total = {}, 0
    for chunk, pipeline in sorted(counts):
        first[pipeline, chunk] = total
        total += counts[chunk, pipeline]
    return first


def _first_expert(file: RankFile, ranks: _Ranks) -> int:
    args = file.state["args"]
    return ranks.expert * (int(args.num_experts or 0) // int(args.expert_model_parallel_size))


def _expert_shards(file: RankFile) -> int:
    args = file.state["args"]
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def _renumbered(pattern: str, name: str, offset: int) -> str:
    add: Callable[[re.Match[str]], str] = lambda match: f"{match[1]}{int(match[2]) + offset}"  # noqa: E731
    return re.sub(pattern, add, name)
