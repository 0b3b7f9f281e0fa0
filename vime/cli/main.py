"""The `vime` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vime.errors import VimeError

EXIT_FAILED = 1
EXIT_USAGE = 2

USAGE = """usage: vime COMMAND ...

Reinforcement learning for language models as one fully asynchronous stream.

commands:
  train   run a job; `vime train --help` lists its flags
  import-script   turn a bash launch script into a file for `vime train --config`
  demo    learn to reverse strings on this machine, be killed twice, and go on without losing a sample
  audit   count a stopped run's groups from its raw journal and training logs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _train, "import-script": _import_script, "demo": _demo, "audit": _audit}
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else EXIT_USAGE
    if words[0] not in commands:
        print(f"vime: unknown command {words[0]!r}\n\n{USAGE}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return commands[words[0]](words[1:])
    except VimeError as error:
        print_error(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def print_error(error: VimeError) -> None:
    """Message and next step on stderr."""
    print(f"\nvime: {error.message}", file=sys.stderr)
    if error.next_step:
        print(f"      Next: {error.next_step}", file=sys.stderr)


def _train(words: list[str]) -> int:
    from vime.cli.train import train

    return train(words)


def _import_script(words: list[str]) -> int:
    from vime.cli.import_script import import_script

    return import_script(words)


def _demo(words: list[str]) -> int:
    from vime.cli.demo import run_demo

    return run_demo(words)


def _audit(words: list[str]) -> int:
    from recovery.audit import audit_run

    parser = argparse.ArgumentParser(prog="vime audit", description="Count a stopped run's groups independently.")
    parser.add_argument("run", type=Path, help="run folder (--save of `vime train`)")
    parser.add_argument("--pool", type=Path, default=None, help="queue root, when it lies elsewhere")
    options = parser.parse_args(words)
    report = audit_run(options.run, options.pool)
    print(json.dumps(dataclasses.asdict(report), indent=1))
    return 0 if report.identity_holds and not report.lost and not report.trained_twice else EXIT_FAILED
