"""What a launch script calls: `train(parse_args(extra_args_provider))`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vime.cli.closed_output import ending_quietly, reader_is_gone
from vime.cli.exit_codes import ExitCode
from vime.cli.report_error import report_error
from vime.cli.train import print_help, start
from vime.errors import SettingsError
from vime.settings.extra_args import FLAG, Provider, flags_added_by, path_of
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.passed_on import listed_megatron_names
from vime.settings.resolve import Resolved, resolve


class ScriptArgs(HookArgs):
    """`HookArgs` with Megatron's arguments, and what `train` needs to start."""

    def __init__(self, resolved: Resolved) -> None:
        settings = resolved.settings
        path = settings.trainer.extra_args_provider_path
        added = () if path is None else flags_added_by(path).values()
        super().__init__(settings, lambda: megatron_args(settings), {*listed_megatron_names(), *added})
        object.__setattr__(self, "_resolved", resolved)


def parse_args(extra_args_provider: Provider | None = None, argv: Sequence[str] | None = None) -> ScriptArgs:
    """Settings of the command line: all of vime's flags and Megatron's as one flat read-only view.

    `extra_args_provider(parser)` adds flags to Megatron's parser and returns it. It must be a top-level function of an
    importable module, since each trainer process imports it again. `--help` prints the flags and exits.

    Raises:
        SettingsError: as `vime.settings.resolve.resolve`, or a provider that other processes can't import.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if print_help(words):
        raise SystemExit(0)
    if extra_args_provider is not None:
        words += [FLAG, path_of(extra_args_provider)]
    return ScriptArgs(resolve(words))


def train(args: ScriptArgs) -> None:
    """Check the settings and run to the end, or with `--dry-run` say what a run would do.

    Exits with the status if it isn't 0.

    Raises:
        VimeError: what `vime train` prints.
    """
    if not isinstance(args, ScriptArgs):
        raise SettingsError(
            f"train got a {type(args).__name__}, allowed: what parse_args returned.",
            next_step="Call train(parse_args(extra_args_provider)).",
        )
    status = start(vars(args)["_resolved"])
    if status:
        raise SystemExit(status)


def megatron_args(settings: Settings) -> Mapping[str, Any]:
    """Megatron's arguments as the first trainer rank sees them. Imports Megatron."""
    from pipeline.model_config import model_config
    from pipeline.trainer_wiring import trainer_config
    from vime.backends.megatron_utils.arguments import parse_megatron_args

    ranks = settings.cluster.num_trainer_ranks
    hf_config = model_config(settings)
    return vars(parse_megatron_args(settings.megatron_args, hf_config, trainer_config(settings, ranks), 0, ranks))


def prepare_pretrain_gpt() -> None:
    """Make `pretrain_gpt` of a Megatron on PYTHONPATH importable, if there is one; otherwise do nothing."""
    if importlib.util.find_spec("pretrain_gpt") is not None:
        from vime.backends.megatron_utils.shim import prepare_megatron

        prepare_megatron()


@contextmanager
def errors_as_exit_status() -> Iterator[None]:
    """Print the error that ends the script as the command line does, and exit with its status."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except Exception as error:  # the outermost boundary, as in `vime.cli.main`
        raise SystemExit(_told(error)) from error


def _told(error: Exception) -> int:
    def tell() -> int:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise error
        return report_error(error)

    return ending_quietly(tell)
