"""Megatron's argument namespace, made by Megatron's own parser and checks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.hf_config import model_argv
from vime.backends.megatron_utils.shim import prepare_megatron
from vime.errors import SettingsError
from vime.models.shape import refuse_contradictions
from vime.settings.extra_args import flags_added_by, load
from vime.settings.passed_on import nearest_words

_ENDLESS_STEPS = 1_000_000_000
"""Length of a schedule that never decays; fixed, so that a resumed run may be longer than it was planned."""

_PORTABLE = (
    # Kernels of Transformer Engine and Apex, and fusions that change the numbers: not needed, so not used.
    *("--transformer-impl", "local", "--attention-backend", "unfused"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    # We check losses and gradients ourselves and name the samples.
    "--no-check-for-nan-in-loss-and-grad",
    # Checkpoints can be read under another layout.
    *("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"),
    *("--tokenizer-type", "NullTokenizer", "--make-vocab-size-divisible-by", "1", "--micro-batch-size", "1"),
)


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Parser of the Megatron that is found first: the installed one, or a modified one on PYTHONPATH."""
    prepare_megatron()
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


@functools.cache
def known_megatron_flags() -> frozenset[str]:
    """Every flag of the installed Megatron, with its dashes. Imports Megatron, which takes seconds."""
    return frozenset(flag for action in megatron_parser()._actions for flag in action.option_strings)


def megatron_options() -> list[tuple[str, str]]:
    """Flag and help of every option of the installed Megatron, sorted."""
    return sorted((flag, action.help or "") for action in megatron_parser()._actions for flag in action.option_strings)


def megatron_destinations() -> frozenset[str]:
    """Attribute names of the installed Megatron's arguments."""
    return frozenset(action.dest for action in megatron_parser()._actions)


def parse_megatron_args(
    extra_argv: Sequence[str], hf_config: Mapping[str, Any], config: TrainerConfig, rank: int = 0, world_size: int = 1
) -> argparse.Namespace:
    """Parse and validate Megatron's arguments.

    Shape flags come from `hf_config`, training flags from `config`, and `extra_argv` (flags of the user) wins over
    both, but may not contradict the model's shape. `config.extra_args_provider_path` adds flags to the parser. The
    result is Megatron's own validated namespace. Raises `SettingsError` for an unknown flag, naming the nearest one,
    for a shape flag that `hf_config` contradicts, or with Megatron's words when it refuses a value; `ModelError` for a
    model it can't build.
    """
    path = config.extra_args_provider_path
    _refuse_unknown_flags(extra_argv, {} if path is None else flags_added_by(path))
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    argv = [*_PORTABLE, *model_argv(hf_config), *_training_argv(config), *extra_argv]
    refuse_contradictions(hf_config, extra_argv)
    with _quiet_exit(argv):
        args: argparse.Namespace = parse_args(extra_args_provider=None if path is None else load(path))
        _override(args, config.megatron_overrides)
        args.rank, args.world_size = rank, world_size
        parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        args.eval_global_batch_size = max(world_size // parallel, 1)
        if args.lr_decay_style != "constant" and args.lr_decay_iters is None and config.train_iters is None:
            raise SettingsError(
                f"--lr-decay-style is {args.lr_decay_style}, but nothing says when the decay ends.",
                next_step="Set --lr-decay-iters or the number of training steps.",
            )
        if args.lr_decay_style == "constant":
            args.lr_decay_iters = _ENDLESS_STEPS
        args.padded_vocab_size = config.padded_vocab_size or calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
        _check_padding(args)
        validate_args(args, {})
    if args.num_experts is not None and args.tensor_model_parallel_size > 1:
        args.sequence_parallel = True  # Megatron requires it for training experts under tensor parallelism.
    return args


def _check_padding(args: argparse.Namespace) -> None:
    rows, tensor = args.padded_vocab_size, args.tensor_model_parallel_size
    if rows < args.vocab_size or rows % tensor:
        raise SettingsError(
            f"--padded-vocab-size is {rows}, allowed: a multiple of {tensor} (--tensor-model-parallel-size), "
            f"{args.vocab_size} or more.",
            next_step="Leave out --padded-vocab-size.",
        )


def _override(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Set attributes; text becomes the number type of the value before it, since YAML reads 1e-6 as text."""
    for name, value in values.items():
        before = vars(args).get(name)
        if isinstance(value, str) and isinstance(before, int | float) and not isinstance(before, bool):
            try:
                value = type(before)(value)
            except ValueError as error:
                raise SettingsError(
                    f"--megatron-config-path: {name} is {value!r}, allowed: a number.", next_step="Correct the file."
                ) from error
        setattr(args, name, value)


def _training_argv(config: TrainerConfig) -> list[str]:
    pairs = {
        "--lr": config.lr,
        "--lr-decay-style": config.lr_decay_style,
        "--weight-decay": config.weight_decay,
        "--clip-grad": config.clip_grad,
        "--adam-beta1": config.adam_beta1,
        "--adam-beta2": config.adam_beta2,
        "--adam-eps": config.adam_eps,
        "--seed": config.seed,
        "--global-batch-size": config.global_batch_size,
        "--train-iters": config.train_iters or _ENDLESS_STEPS,
    }
    argv = [text for flag, value in pairs.items() for text in (flag, str(value))]
    if config.num_further:
        argv += ["--mtp-num-layers", str(config.num_further)]
    if config.precision == "bf16":
        argv.append("--bf16")
    if torch.cuda.is_available() and config.distributed_backend != "nccl":
        raise SettingsError(
            f"--distributed-backend is {config.distributed_backend}, and this rank has a GPU, allowed: nccl.",
            next_step="Leave out --distributed-backend.",
        )
    if not torch.cuda.is_available():
        argv += ["--use-cpu-initialization", "--distributed-backend", "gloo"]
    return argv


def _refuse_unknown_flags(extra_argv: Sequence[str], added: Mapping[str, str]) -> None:
    known = known_megatron_flags() | added.keys()
    for text in extra_argv:
        flag = text.split("=", 1)[0]
        if flag.startswith("--") and flag not in known:
            raise SettingsError(
                f"Megatron has no flag {flag}{nearest_words(flag, known)}.", next_step="Correct or remove the flag."
            )


@contextlib.contextmanager
def _quiet_exit(argv: Sequence[str]) -> Iterator[None]:
    """Run Megatron's parser, which reads `sys.argv`, prints, exits and asserts; turn its refusals into ours."""
    before, said = sys.argv, io.StringIO()
    sys.argv = ["megatron", *argv]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit as error:
        words = said.getvalue().strip().splitlines()
        raise SettingsError(f"Megatron refused the flags: {words[-1] if words else 'no reason given'}.") from error
    except (AssertionError, ValueError, RuntimeError) as error:
        raise SettingsError(f"Megatron refused the flags: {refusal_words(error)}.") from error
    finally:
        sys.argv = before


def refusal_words(error: Exception) -> str:
    """What an exception of Megatron says; of an assertion without words, what it asserts."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    asserted = line.removeprefix("assert ").replace("self.", "").replace("args.", "") if "assert " in line else ""
    return str(error).rstrip(".") or (f"not so: {asserted}" if asserted else type(error).__name__)
