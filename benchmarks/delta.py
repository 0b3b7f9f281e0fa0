"""How many bytes a publication of changed weights takes, and whether hosts end with exactly the trainer's weights."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from vime.backends.vllm_utils.disk.layout import version_folder
from vime.backends.vllm_utils.disk.mirror import HostMirror
from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter, WrittenVersion
from vime.backends.vllm_utils.weight_folder import read_weight_folder, verify_weight_folder, weight_names
from vime.errors import PublicationError

DESCRIPTION = """\
Measures deltas of weights: trains a Qwen3 model (float32 master weights, AdamW, lr 1e-6, random tokens) and publishes
its bf16 weights after each optimizer step as a delta on disk; a host's copy pulls every version. After each pull the
copy is compared with the trainer's weights bit for bit. At the end a delta with one changed byte and a delta that is
missing are pulled: both must be refused, and a whole version must repair the copy. A repeat is one run of 20 steps
(--quick: 5, and a smaller model) from other random weights.

  bytes_over_full              bytes of a delta's files over those of a whole version: mean over the steps, encoding xor
  bytes_over_full_overwrite    the same with the encoding overwrite
  density                      share of all bytes that a step changed
  bit_equal                    share of the pulls after which every tensor equalled the trainer's
  refused_and_repaired         share of the damaged versions that were refused and then repaired by a whole version
  write_over_full              seconds to write a delta over seconds to write a whole version
  pull_over_full               seconds to pull and check a delta over seconds to pull and check a whole version

The exit status is 1 when bit_equal or refused_and_repaired isn't 1.
"""
LEARNING_RATE = 1e-6
STEPS, QUICK_STEPS = 20, 5

Weights = dict[str, torch.Tensor]


def build_model(seed: int, *, quick: bool) -> Any:
    """A Qwen3 with weights of standard deviation 0.02, in float32: 13 million parameters, or half a million."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    width, layers, vocab = (128, 2, 512) if quick else (384, 6, 4096)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            head_dim=32,
            intermediate_size=3 * width,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
    )


def training_steps(model: Any, num_steps: int) -> Iterator[Weights]:
    """The bf16 weights before training, and after each optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    yield published_weights(model)
    for _ in range(num_steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, 32))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        yield published_weights(model)


def published_weights(model: Any) -> Weights:
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def equal_bit_for_bit(folder: Path, weights: Weights) -> bool:
    held = dict(read_weight_folder(folder, weight_names(folder)))
    return held.keys() == weights.keys() and all(
        torch.equal(held[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in weights.items()
    )


class Host:
    """Trainer's writer and one host's copy, with one encoding."""

    def __init__(self, folder: Path, format_: DeltaFormat) -> None:
        self.root = folder / "published"
        self.writer = VersionWriter(self.root, delta=format_)
        self.mirror = HostMirror(folder / "local")
        self.written: list[WrittenVersion] = []
        self.write_s: list[float] = []
        self.pull_s: list[float] = []
        self.num_equal = 0

    def publish(self, version: int, weights: Weights, *, full: bool = False) -> None:
        """Write and pull a version, check it as an engine does, and compare it with the trainer's weights."""
        started = time.perf_counter()
        written = self.writer.write(version, weights.items(), full=full)
        finished = time.perf_counter()
        folder = self.mirror.pull(self.root, version)
        self.pull_s.append(time.perf_counter() - finished)
        self.write_s.append(finished - started)
        self.written.append(written)
        verify_weight_folder(folder, written.receipt.names, written.receipt.digest)
        self.num_equal += equal_bit_for_bit(folder, weights)

    def bytes_over_full(self) -> float:
        """Mean over the deltas."""
        whole, *deltas = self.written
        return sum(delta.wire_bytes for delta in deltas) / len(deltas) / whole.wire_bytes


def refused(host: Host, version: int) -> bool:
    try:
        host.mirror.pull(host.root, version)
    except PublicationError:
        return True
    return False


def survives_damage(host: Host, version: int, weights: Weights) -> float:
    """Share of two damages (one changed byte, a missing version) that are refused and repaired by a whole version."""
    good = 0
    for step, damage in enumerate(("changed byte", "missing")):
        number = version + 2 * step
        newer = {name: tensor * 1.01 for name, tensor in weights.items()}
        host.writer.write(number, newer.items())
        folder = version_folder(host.root, number)
        if damage == "missing":
            shutil.rmtree(folder)
        else:
            file = min(folder.glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-20] ^= 1
            file.write_bytes(content)
        was_refused = refused(host, number)
        before = host.num_equal
        host.publish(number + 1, newer, full=True)
        good += was_refused and host.num_equal == before + 1 and host.written[-1].base_version is None
        weights = newer
    return good / 2


def measure(folder: Path, seed: int, *, quick: bool) -> dict[str, float]:
    """One run; every value of the report."""
    steps = QUICK_STEPS if quick else STEPS
    hosts = {name: Host(folder / name, DeltaFormat(name)) for name in ("xor", "overwrite")}
    for version, weights in enumerate(training_steps(build_model(seed, quick=quick), steps), start=1):
        for host in hosts.values():
            host.publish(version, weights)
    xor = hosts["xor"]
    values = {
        "bytes_over_full": xor.bytes_over_full(),
        "bytes_over_full_overwrite": hosts["overwrite"].bytes_over_full(),
        "density": sum(delta.density for delta in xor.written[1:]) / steps,
        "bit_equal": sum(host.num_equal for host in hosts.values()) / (len(hosts) * (steps + 1)),
        "write_over_full": sum(xor.write_s[1:]) / steps / xor.write_s[0],
        "pull_over_full": sum(xor.pull_s[1:]) / steps / xor.pull_s[0],
    }
    values["refused_and_repaired"] = sum(survives_damage(host, steps + 2, weights) for host in hosts.values()) / 2
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse_options(benchmark_parser("delta", DESCRIPTION, repeats=5), argv)
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="vime-delta-") as folder:
        for repeat in range(options.repeats):
            for name, number in measure(Path(folder) / str(repeat), repeat, quick=options.quick).items():
                values.setdefault(name, []).append(number)
            shutil.rmtree(Path(folder) / str(repeat))
        packages = ["torch", "transformers", "pyarrow", "xxhash"]
        report = build_report("delta", values, argv=argv, packages=packages, folder=Path(folder))
    print_report(report, only_json=options.json)
    return 0 if min(values["bit_equal"] + values["refused_and_repaired"]) == 1.0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
