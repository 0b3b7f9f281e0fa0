"""`vime convert`: checkpoints between Hugging Face and Megatron's formats."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

from recovery.commit import commit_path, read_commit
from recovery.run_location import locate_run
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place
from vime.cli.look import count, num_bytes, print_json
from vime.errors import NoRunError, SettingsError

EXAMPLES = (
    "vime convert models/qwen3 models/qwen3_megatron --to torch_dist",
    "vime convert models/qwen3_megatron models/qwen3_back --to hf --hf-checkpoint models/qwen3",
    "vime convert runs/a models/a_step_39 --to hf --ckpt-step 39",
)
_LINES_EVERY_S = 10.0


def convert(words: list[str]) -> int:
    """Run the command; the exit status. Raises as `vime.backends.megatron_utils.convert.convert`."""
    options = _parser().parse_args(words)
    source = WeightSource("SOURCE", options.source.absolute(), options.ckpt_step)
    _refuse_no_checkpoint(source)
    hf_checkpoint = _hf_checkpoint(source, options.hf_checkpoint)
    _check_commit(source)
    # The work is reading and writing: on a machine with GPUs it leaves them to others.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")  # of the frameworks that are loaded next
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from vime.backends.megatron_utils.convert import Conversion
    from vime.backends.megatron_utils.convert import convert as run

    conversion = Conversion(
        source,
        options.target.absolute(),
        options.to,
        hf_checkpoint,
        not options.skip_logits,
        _model_name(source, options.model_name),
    )
    converted = run(conversion, _Line())
    if options.json:
        print_json(converted)
        return ExitCode.DONE
    print(
        f"{options.target}: {converted.num_tensors} tensors, {num_bytes(converted.num_bytes)}, read back and equal "
        f"(digest {converted.digest})."
    )
    if converted.logits_relative_difference is not None:
        print(f"Logits on a probe differ by {converted.logits_relative_difference:.1e} of the largest.")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = help_parser(
        "vime convert",
        "Convert a checkpoint tensor by tensor, in the memory of a few layers, and compare the result with the source. "
        "TARGET appears when it is whole; nothing is ever overwritten.",
        EXAMPLES,
    )
    parser.add_argument(
        "source", type=place, metavar="SOURCE",
        help="Hugging Face folder, folder of Megatron checkpoints of either format and any layout, or run folder",
    )  # fmt: skip
    parser.add_argument("target", type=place, metavar="TARGET", help="folder to make")
    parser.add_argument("--to", required=True, choices=("hf", "torch_dist", "torch"), help="format of TARGET")
    parser.add_argument(
        "--hf-checkpoint", type=place, default=None,
        help="folder with the model's config.json and tokenizer; where left out, SOURCE's own or that of its run",
    )  # fmt: skip
    parser.add_argument(
        "--model-name", default=None,
        help="family of the model in place of config.json's model_type; where left out, that of SOURCE's run",
    )  # fmt: skip
    parser.add_argument("--ckpt-step", type=count, default=None, help="iteration of SOURCE; the newest when left out")
    parser.add_argument("--skip-logits", action="store_true", help="compare the numbers, but not logits on a probe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _refuse_no_checkpoint(source: WeightSource) -> None:
    """Raise `SettingsError` where there is no folder, `RestoreError` where it holds no checkpoint."""
    if not source.directory.is_dir():
        found = "is a file, not a folder" if source.directory.exists() else "doesn't exist"
        raise SettingsError(f"SOURCE {source.directory} {found}.", next_step="Correct the path.")
    _ = source.folder


def _hf_checkpoint(source: WeightSource, given: Path | None) -> Path:
    if given is not None:
        return given.absolute()
    if source.is_hugging_face:
        return source.directory
    try:
        named = locate_run(source.directory, needs_queue=False).settings.checkpoint.hf_checkpoint
    except NoRunError:
        named = None
    if named is None:
        raise SettingsError(
            f"{source.directory} holds no config.json of a Hugging Face model.",
            next_step="Name a folder that does with --hf-checkpoint.",
        )
    return Path(named)


def _model_name(source: WeightSource, given: str | None) -> str | None:
    if given is not None or source.is_hugging_face:
        return given
    try:
        return locate_run(source.directory, needs_queue=False).settings.checkpoint.model_name
    except NoRunError:
        return None


def _check_commit(source: WeightSource) -> None:
    """Compare a checkpoint that a run has committed with its digests."""
    if source.is_hugging_face or not (source.directory / "rollout").is_dir():
        return
    number = source.megatron_folder().name.removeprefix("iter_")
    path = commit_path(source.directory, int(number)) if number.isdigit() else None
    if path is not None and path.exists():
        read_commit(path)


class _Line:
    """Progress on standard error: one line that is written over, or outside a terminal a line now and then."""

    def __init__(self) -> None:
        self._told_at, self._doing = 0.0, ""

    def __call__(self, doing: str, done: int, total: int) -> None:
        ends = done == total
        is_terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not ends and now - self._told_at < (0.1 if is_terminal else _LINES_EVERY_S):
            return
        self._told_at = now
        text = f"{doing}: {done} of {total} parameters" if total > 1 else doing
        if not is_terminal:
            print(text, file=sys.stderr)
        else:
            print(f"\r\x1b[K{text}", end="\n" if ends else "", file=sys.stderr, flush=True)
