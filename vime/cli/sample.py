"""`vime sample`: one sample with its tokens, and its way from prompt line to optimizer step and back."""

from __future__ import annotations

import argparse

from pipeline.lineage import trace_sample, trace_step
from pipeline.sample_view import show_sample
from pipeline.token_text import token_text
from vime.cli import sample_tables
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import endings_help, place
from vime.cli.look import command_parser, print_json, run_of, show
from vime.cli.unknown_command import unknown_command
from vime.errors import SettingsError

USAGE = """usage: vime sample COMMAND RUN ...

Look at one sample of a run, live or not. Nothing is locked and nothing is written.

commands:
  show     tokens with the policy version that made each, text, reward and metadata
  trace    from the prompt's file:line to the optimizer steps that trained it; with --step the way back

`vime sample COMMAND --help` lists the options.
"""
DEFAULT_TOKENS = 64


def sample(words: list[str]) -> int:
    """Run one of the commands; the exit status."""
    commands = {"show": _show, "trace": _trace}
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n{endings_help()}")
        return ExitCode.DONE if words else ExitCode.USER
    if words[0] not in commands:
        return unknown_command("vime sample", words[0], commands)
    commands[words[0]](words[1:])
    return ExitCode.DONE


def _show(words: list[str]) -> None:
    parser = command_parser(
        "vime sample show",
        "Show one sample: an accepted one, or else what its dead letter holds.",
        ["vime sample show runs/a 34", "vime sample show runs/a 34 --tokens all --tokenizer models/qwen"],
    )
    parser.add_argument("sample", type=int, metavar="ID", help="index of the sample")
    parser.add_argument(
        "--tokens", type=_num_tokens, default=DEFAULT_TOKENS, metavar="N|all",
        help=f"most response tokens to list (default {DEFAULT_TOKENS})",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", type=place, default=None, help="folder of the tokenizer; the run's --hf-checkpoint when left out"
    )
    options = parser.parse_args(words)
    location = run_of(options)
    view = show_sample(location, options.sample, token_text(location, options.tokenizer))
    if options.json:
        print_json(view)
    else:
        show(sample_tables.show(view, options.tokens))


def _trace(words: list[str]) -> None:
    parser = command_parser(
        "vime sample trace",
        "Follow one sample from its prompt's line to the optimizer steps that trained it, or list what a step trained.",
        ["vime sample trace runs/a 34", "vime sample trace runs/a --step 5", "vime sample trace runs/a --step 5.0"],
    )
    parser.add_argument("sample", type=int, nargs="?", metavar="ID", help="index of the sample")
    parser.add_argument(
        "--step", type=_step, default=None, metavar="ROLLOUT[.STEP]",
        help="list the samples of this rollout batch, or of one of its optimizer steps",
    )  # fmt: skip
    parser.add_argument("--branch", default=None, help="with --step: the session; the one that counts when left out")
    options = parser.parse_args(words)
    if (options.sample is None) == (options.step is None):
        raise SettingsError(
            "Give the index of a sample, or --step, and not both.",
            next_step="`vime sample trace RUN --step ROLLOUT` lists the samples of a batch.",
        )
    if options.step is None:
        trace = trace_sample(run_of(options), options.sample)
        if options.json:
            print_json(trace)
        else:
            show(sample_tables.trace(trace))
        return
    rollout, step = options.step
    samples = trace_step(run_of(options), rollout, step, options.branch)
    if options.json:
        print_json(samples)
    else:
        show(sample_tables.step(samples))


def _num_tokens(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'all'")
    return int(text)


def _step(text: str) -> tuple[int, int | None]:
    rollout, _, step = text.partition(".")
    if not rollout.isdigit() or (step and not step.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLLOUT or ROLLOUT.STEP, two whole numbers")
    return int(rollout), int(step) if step else None
