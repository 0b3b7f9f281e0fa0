"""One rank of a world that converts, gathers and loads checkpoints; see `megatron_worker`."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.support.tiny_families import FAMILIES, FURTHER_COPIES, build_further_model, build_tiny_model
from tests.vime.backends.megatron_utils.family_worker import same, tensors_of
from tests.vime.backends.megatron_utils.megatron_worker import World, main
from vime.backends.megatron_utils import convert as module
from vime.backends.megatron_utils.checkpoint_weights import load_weights
from vime.backends.megatron_utils.convert import Conversion, Converted, convert
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.megatron_utils.hf_mapping import AttentionShape, attention_shape, split
from vime.backends.megatron_utils.open_weights import open_weights
from vime.backends.megatron_utils.safetensors_files import write_checkpoint
from vime.backends.megatron_utils.skeleton import open_skeleton
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import VimeError
from vime.models.weight_names import WeightRule, weight_rules

# isort: split
# Megatron's training package can be imported once the trainer has repaired its imports.
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # conversion runs on the CPU, as `vime convert` sees to
BOTH_FORMATS = ("qwen2", "deepseek_v3")
Tensors = dict[str, torch.Tensor]


def convert_to(folder: Path, to: Any, hf: Path, *, source: Path | None = None, **options: Any) -> Converted:
    conversion = Conversion(WeightSource("SOURCE", source or hf), folder, to, hf, **options)
    return convert(conversion, lambda *_: None)


# --- one rank ---------------------------------------------------------------------------------------------------------


def round_trips(world: World) -> dict[str, Any]:
    """Every family into both of Megatron's formats and back, and what the target's record says."""
    found = {}
    for name in FAMILIES:
        hf = build_tiny_model(world.folder / f"hf_{name}", name, seed=4)
        original = tensors_of(hf)
        for to in ("torch_dist", "torch") if name in BOTH_FORMATS else ("torch_dist",):
            there = convert_to(world.folder / f"{name}_{to}", to, hf)
            back = convert_to(world.folder / f"{name}_{to}_hf", "hf", hf, source=world.folder / f"{name}_{to}")
            folder = world.folder / f"{name}_{to}_hf"
            record = json.loads((folder / "vime_conversion.json").read_text())
            found[f"{name}_{to}"] = {
                "bit_equal": same(tensors_of(folder), original),
                "digests_equal": there.digest == back.digest == record["digest"],
                "logits": max(there.logits_relative_difference or 0.0, back.logits_relative_difference or 0.0),
                "files_kept": (folder / "config.json").read_text() == (hf / "config.json").read_text()
                and (folder / "tokenizer.json").is_file(),
            }
    return found


def further_layers(world: World) -> dict[str, Any]:
    """A model whose files have a layer for a further token: there, back, and read by who leaves that layer out."""
    hf = build_further_model(world.folder / "hf_further")
    config, original = read_hf_config(hf), tensors_of(hf)
    found: dict[str, Any] = {}
    for to in ("torch_dist", "torch"):
        folder, again = world.folder / f"further_{to}", world.folder / f"further_{to}_hf"
        there, back = convert_to(folder, to, hf), convert_to(again, "hf", hf, source=folder)
        with open_weights(WeightSource("SOURCE", folder), config) as reader:
            said = words_of(lambda reader=reader: reader.check_names(weight_rules(config)))
        found[to] = {
            "bit_equal": same(tensors_of(again), original),
            "digests_equal": there.digest == back.digest,
            "without_it": said,
        }
    with world.trainer(hf_checkpoint=hf, num_further=1) as trainer:
        saved = {
            "torch_dist": trainer.save(world.folder / "further_saved", 1),
            "torch": save_torch(trainer, world.folder / "further_saved_torch"),
        }
        for to in saved:
            loaded_from(trainer, world.folder / f"further_{to}")
            trainer.save_hf(world.folder / f"further_{to}_loaded")
    for to, folder in saved.items():
        convert_to(world.folder / f"further_{to}_saved", "hf", hf, source=folder, checks_logits=False)
        for how in ("loaded", "saved"):
            found[to][how] = same(tensors_of(world.folder / f"further_{to}_{how}"), original)
    layer = "model.layers.3."
    kept = {name: tensor for name, tensor in original.items() if not name.startswith(layer)}
    bare = {name: tensor for name, tensor in original.items() if name.removeprefix(layer) not in FURTHER_COPIES}
    changed = {**original, f"{layer}shared_head.head.weight": original["lm_head.weight"] + 1}
    torn = {name: tensor for name, tensor in original.items() if name != f"{layer}eh_proj.weight"}
    for name, tensors in {"kept": kept, "bare": bare, "changed": changed, "torn": torn}.items():
        source, folder, again = (world.folder / f"further_{name}{end}" for end in ("", "_torch_dist", "_hf"))
        shutil.copytree(hf, source)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        said = words_of(lambda folder=folder, source=source: convert_to(folder, "torch_dist", source))
        if said == "nothing":
            convert_to(again, "hf", hf, source=folder)
            said = sorted(tensors_of(again).keys() - tensors.keys())
        found[name] = said
    return found


def between_megatron_formats(world: World) -> dict[str, Any]:
    hf = build_tiny_model(world.folder / "hf_formats", "deepseek_v3", seed=5)
    renamed = world.folder / "hf_renamed"
    shutil.copytree(hf, renamed)
    config = json.loads((hf / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps({**config, "model_type": "house_model"}))
    first = convert_to(world.folder / "formats_torch", "torch", renamed, model_name="DeepseekV3Config")
    second = convert_to(world.folder / "formats_torch_dist", "torch_dist", hf, source=world.folder / "formats_torch")
    return {"digests_equal": first.digest == second.digest}


def megatron_reads_torch(world: World) -> dict[str, Any]:
    """The `torch` format as Megatron's own loader opens it."""
    hf = build_tiny_model(world.folder / "hf_plain", "qwen2_untied", seed=5)
    convert_to(world.folder / "plain_torch", "torch", hf)
    state = torch.load(world.folder / "plain_torch/release/mp_rank_00/model_optim_rng.pt", weights_only=True)
    with world.trainer(hf_checkpoint=hf, load=False) as trainer:
        unwrap_model(trainer._learner.chunks[0]).load_state_dict(state["model"], strict=True)
        weights = weights_of(trainer)
    return {
        "bit_equal": same(weights, tensors_of(hf)),
        "version": state["checkpoint_version"],
        "iteration": state["iteration"],
        "layers": state["args"].num_layers,
    }


def refusals(world: World) -> dict[str, Any]:
    """What is said of sources and targets that won't do, and what is left on the disk."""
    good = build_tiny_model(world.folder / "good", "qwen2", seed=6)
    weights = load_file(good / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    broken: dict[str, Tensors] = {
        "missing": {name: tensor for name, tensor in weights.items() if name != key},
        "unknown": {**weights, "model.layers.1.mlp.extra.weight": torch.zeros(2)},
        "shape": {**weights, key: torch.zeros(64, 90)},
        "parts": {**weights, "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 60)},
        "dtype": {**weights, key: torch.zeros(64, 96, dtype=torch.int8)},
        "mixed": {**weights, key: weights[key].half()},
    }
    said = {}
    for name, tensors in broken.items():
        folder = world.folder / name
        folder.mkdir()
        (folder / "config.json").write_text((good / "config.json").read_text())
        save_file(tensors, folder / "model.safetensors")
        said[name] = words_of(lambda folder=folder: convert_to(world.folder / "t", "torch_dist", folder))
    predicting = json.loads((good / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    shutil.copytree(good, world.folder / "predicting")
    (world.folder / "predicting" / "config.json").write_text(json.dumps(predicting))
    behind = f"model.layers.{predicting['num_hidden_layers']}.eh_proj.weight"
    save_file({**weights, behind: torch.zeros(2)}, world.folder / "predicting" / "model.safetensors")
    said["further"] = words_of(lambda: convert_to(world.folder / "t", "torch_dist", world.folder / "predicting"))
    (world.folder / "taken").mkdir()
    said["taken"] = words_of(lambda: convert_to(world.folder / "taken", "torch", good))
    said["same"] = words_of(lambda: convert_to(world.folder / "t", "hf", good))
    with patched(module, "open_weights", flipping(module.open_weights)):
        said["damaged"] = words_of(lambda: convert_to(world.folder / "t", "torch_dist", good))
    with patched(module.probe, "relative_difference", lambda *_: 0.5):
        said["logits"] = words_of(lambda: convert_to(world.folder / "t", "torch", good))
    said["left"] = ", ".join(path.name for pattern in ("t", ".*partial*") for path in world.folder.glob(pattern))
    return said


def words_of(action: Callable[[], object]) -> str:
    try:
        action()
    except VimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def flipping(open_it: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the second checkpoint, the target, with one number changed."""
    opened = []

    def open_changed(*args: Any) -> Any:
        reader = open_it(*args)
        opened.append(reader)
        if len(opened) == 2:
            read = reader.read

            def changed(rule: Any) -> torch.Tensor:
                tensor = read(rule)
                if rule.megatron_name == "decoder.final_layernorm.weight":
                    tensor.view(-1)[3] += 1
                return tensor

            reader.read = changed
        return reader

    return open_changed


def memory(world: World) -> dict[str, Any]:
    """Peak memory of converting a model of many layers, there and back, in units of a layer."""
    small = build_tiny_model(world.folder / "small", "qwen2", seed=8)
    convert_to(world.folder / "warm", "torch_dist", small)
    convert_to(world.folder / "warm_hf", "hf", small, source=world.folder / "warm")
    hf = many_layers(world, small, 32)
    layer_bytes = (hf / "model.safetensors").stat().st_size / 32
    found = {}
    for to in ("torch_dist", "torch"):
        there, back = world.folder / f"large_{to}", world.folder / f"large_{to}_hf"
        found[to] = peak_bytes(functools.partial(convert_to, there, to, hf)) / layer_bytes
        found[f"{to}_back"] = peak_bytes(functools.partial(convert_to, back, "hf", hf, source=there)) / layer_bytes
        shutil.rmtree(there)
        shutil.rmtree(back)
    return found


def many_layers(world: World, small: Path, layers: int) -> Path:
    """A model whose layers of 13 MB are nearly all of it."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 8}
    config = {**json.loads((small / "config.json").read_text()), **sizes, "layer_types": ["full_attention"] * layers}
    folder = world.folder / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with open_skeleton(folder, config) as skeleton:
        shape = attention_shape(config)
        weights = (
            (name, torch.randn(part.shape) * 0.02)
            for rule in skeleton.rules
            for name, part in named_parts(rule, torch.empty(skeleton.shape(rule), device="meta"), shape)
        )
        write_checkpoint(weights, folder, world.folder / "hf_large")
    return world.folder / "hf_large"


def named_parts(rule: WeightRule, full: torch.Tensor, shape: AttentionShape) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(rule.hf_names, split(rule, full, shape), strict=True)


def peak_bytes(action: Callable[[], object]) -> int:
    """How far the resident memory of the process rose above where it was."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


# --- several ranks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    family: str
    argv: tuple[str, ...]
    layers: int = 4

    def compare(self, world: World) -> dict[str, Any]:
        """The stream of weights, both saved formats and loading, all against the Hugging Face file."""
        name = "_".join(word.strip("-").replace("-", "") for word in self.argv) + self.family
        folder = world.folder / f"hf_{name}_{world.rank}"
        hf = build_tiny_model(folder, self.family, seed=7, num_hidden_layers=self.layers, vocab_size=51)
        original = tensors_of(hf)
        converted = {}
        for to in ("torch_dist", "torch"):
            converted[to] = world.folder / f"converted_{name}_{to}"
            if world.rank == 0:
                convert_to(converted[to], to, hf, checks_logits=False)
        with world.trainer(*self.argv, hf_checkpoint=hf) as trainer:
            stream, most_bytes = streamed(trainer)
            saved = {
                "torch_dist": trainer.save(world.folder / f"saved_{name}", 1),
                "torch": save_torch(trainer, world.folder / f"saved_torch_{name}"),
            }
            for _ in range(2):  # the second replaces the first
                trainer.save_hf(world.folder / f"export_{name}")
            loaded = {to: loaded_from(trainer, source) for to, source in converted.items()}
            load_weights(trainer._learner.chunks, converted["torch_dist"] / "release")
            by_megatron = weights_of(trainer)
        if world.rank != 0:
            return {}
        read = {to: read_all(source, hf) for to, source in saved.items()}
        order = [each for rule in weight_rules(read_hf_config(hf)) for each in rule.hf_names]
        return {
            "stream": [key for key, _ in stream] == order and same(dict(stream), original),
            "exported": same(tensors_of(world.folder / f"export_{name}"), original),
            "held": most_bytes / max(tensor.nbytes for tensor in original.values()),
            "saved": {to: same(tensors, original) for to, tensors in read.items()},
            "loaded": {to: same(tensors, original) for to, tensors in loaded.items()},
            "by_megatron": same(by_megatron, original),
        }


def weights_of(trainer: MegatronTrainer) -> Tensors:
    return {name: tensor.to("cpu", copy=True) for name, tensor in trainer.named_hf_weights()}


def streamed(trainer: MegatronTrainer) -> tuple[list[tuple[str, torch.Tensor]], int]:
    """The stream, and the most bytes of it that were alive at once while nobody kept it."""
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
    most = 0
    for _, tensor in trainer.named_hf_weights():
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            alive.append((weakref.ref(base), base.untyped_storage().nbytes()))
        del tensor
        most = max(most, sum(size for reference, size in alive if reference() is not None))
        del base
    return [(name, tensor.to("cpu", copy=True)) for name, tensor in trainer.named_hf_weights()], most


def loaded_from(trainer: MegatronTrainer, folder: Path) -> Tensors:
    """The weights after loading `folder` over zeros."""
    with torch.no_grad():
        for chunk in trainer._learner.chunks:
            for tensor in chunk.state_dict(keep_vars=True).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
    trainer.load_weights(WeightSource("--load", folder))
    return weights_of(trainer)


def save_torch(trainer: MegatronTrainer, directory: Path) -> Path:
    """What Megatron's own training writes in the `torch` format, model alone."""
    args = copy.copy(trainer._args)
    args.ckpt_format, args.no_save_optim = "torch", True
    chunks = [unwrap_model(chunk) for chunk in trainer._learner.chunks]
    state = checkpointing.generate_state_dict(args, chunks, None, None, None, iteration=1)
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if args.num_experts
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    if replica == 0:
        path = Path(checkpointing.get_checkpoint_name(str(directory), 1))
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    dist.barrier()
    return directory / "iter_0000001"


def read_all(folder: Path, hf: Path) -> Tensors:
    hf_config = read_hf_config(hf)
    rules, shape = weight_rules(hf_config), attention_shape(hf_config)
    with open_weights(WeightSource("SOURCE", folder), hf_config) as reader:
        reader.check_names(rules)
        return {name: part for rule in rules for name, part in named_parts(rule, reader.read(rule), shape)}


TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
VIRTUAL = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
EXPERTS = ("--expert-model-parallel-size", "2")
LAYOUTS = {
    "tensor": Layout("qwen2", TENSOR),
    "tensor_latent": Layout("deepseek_v3", TENSOR),
    "pipeline_latent": Layout("deepseek_v3", PIPELINE),
    "virtual": Layout("llama_tied", VIRTUAL),
    "experts": Layout("qwen3_moe", EXPERTS),
    "experts_latent": Layout("deepseek_v3", EXPERTS),
    "context": Layout("qwen2_untied", ("--context-parallel-size", "2")),
    "tensor_pipeline_latent": Layout("deepseek_v3", (*TENSOR, *PIPELINE)),
    "tensor_virtual": Layout("llama_scaled", (*TENSOR, *VIRTUAL)),
    "experts_of_tensor_ranks": Layout("qwen3_moe", (*EXPERTS, *TENSOR, "--expert-tensor-parallel-size", "1")),
    "cut_experts": Layout("deepseek_v3", (*EXPERTS, *TENSOR, "--expert-tensor-parallel-size", "2")),
    "pipeline_experts": Layout("deepseek_v3", (*EXPERTS, *PIPELINE)),
}

if __name__ == "__main__":
    main(
        {
            "round_trips": round_trips,
            "further_layers": further_layers,
            "between_megatron_formats": between_megatron_formats,
            "megatron_reads_torch": megatron_reads_torch,
            "refusals": refusals,
            "memory": memory,
            **{name: functools.partial(Layout.compare, layout) for name, layout in LAYOUTS.items()},
        }
    )
