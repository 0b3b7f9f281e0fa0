"""The `vime` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.cli.closed_output import ending_quietly, reader_is_gone
from vime.cli.exit_codes import ExitCode, exit_codes_help
from vime.cli.report_error import report_error
from vime.versions import installed_version

USAGE = """usage: vime COMMAND ...
       vime --version

Reinforcement learning for language models as one fully asynchronous stream.

commands:
  train           run a job; `vime train --help` lists its flags
  convert         checkpoints between Hugging Face and Megatron's formats, compared after
  import-script   turn a bash launch script into a file for `vime train --config`
  demo            learn to reverse strings on this machine, be killed twice, and go on without losing a sample
  doctor          check this machine, and whether the flags of a job fit it
  parity          compare the engines of a job with its trainer, token by token
  runs            list the sessions of a run with their commits, and what keeps each of these
  queue           look into a run's queue: groups, leases, dead letters, versions; requeue or drop groups
  sample          show a sample's tokens, or follow it from prompt line to optimizer step and back
  view            serve a page about a run on this machine: numbers, samples, timeline, failures, branches
  report          write the same plots and a summary into one HTML file
  replay          train one stored rollout again, and compare every number with what the run logged
  audit           count a stopped run's groups from its raw journal and training logs
"""


_OF_TWO_WORDS = ("queue", "sample")
"""Commands that are followed by the name of one of theirs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status, see `vime.cli.exit_codes`."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ending_quietly(lambda: _run(words))


def _run(words: list[str]) -> int:
    commands = {
        "train": _train,
        "convert": _convert,
        "import-script": _import_script,
        "demo": _demo,
        "doctor": _doctor,
        "parity": _parity,
        "runs": _runs,
        "queue": _queue,
        "sample": _sample,
        "view": _view,
        "report": _report,
        "replay": _replay,
        "audit": _audit,
    }
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n{exit_codes_help()}")
        return ExitCode.DONE if words else ExitCode.USER
    if words[0] == "--version":
        print(f"vime {installed_version('vime') or '(not installed: run from its source)'}")
        return ExitCode.DONE
    if words[0] not in commands:
        from vime.cli.unknown_command import unknown_command

        return unknown_command("vime", words[0], commands)
    try:
        return commands[words[0]](words[1:])
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except SystemExit as error:  # argparse has printed the help or its complaint, and kept quiet about a closed pipe
        if reader_is_gone():
            raise BrokenPipeError from None
        if not error.code:
            return ExitCode.DONE
        command = words[:2] if words[0] in _OF_TWO_WORDS else words[:1]
        print(f"      Next: `vime {' '.join(command)} --help` lists what it takes.", file=sys.stderr)
        return ExitCode.USER
    except BrokenPipeError as error:
        if reader_is_gone():
            raise
        return report_error(error)
    except Exception as error:  # the outermost boundary: what ends a command becomes a message and an exit status
        return report_error(error)


def _train(words: list[str]) -> int:
    from vime.cli.train import train

    return train(words)


def _convert(words: list[str]) -> int:
    from vime.cli.convert import convert

    return convert(words)


def _import_script(words: list[str]) -> int:
    from vime.cli.import_script import import_script

    return import_script(words)


def _demo(words: list[str]) -> int:
    from vime.cli.demo import run_demo

    return run_demo(words)


def _doctor(words: list[str]) -> int:
    from vime.cli.doctor import doctor

    return doctor(words)


def _parity(words: list[str]) -> int:
    from vime.cli.parity import parity

    return parity(words)


def _runs(words: list[str]) -> int:
    from vime.cli.runs import runs

    return runs(words)


def _queue(words: list[str]) -> int:
    from vime.cli.queue import queue

    return queue(words)


def _sample(words: list[str]) -> int:
    from vime.cli.sample import sample

    return sample(words)


def _view(words: list[str]) -> int:
    from vime.cli.view import view

    return view(words)


def _report(words: list[str]) -> int:
    from vime.cli.report import report

    return report(words)


def _replay(words: list[str]) -> int:
    from vime.cli.replay import replay_rollout

    return replay_rollout(words)


def _audit(words: list[str]) -> int:
    from vime.cli.audit import audit

    return audit(words)
