"""The workers of an engine on one of its further nodes, without a server.

    python -m vime.backends.vllm_utils.headless --headless --nnodes N --node-rank R OPTION ...

vLLM's own command does the same, but its CPU package can't start that command.
"""

from __future__ import annotations

import sys

from vime.backends.vllm_utils.arguments import vllm_parser


def main(argv: list[str]) -> None:
    """Run until the engine's first node ends."""
    from vllm.entrypoints.cli.serve import run_headless

    arguments = vllm_parser().parse_args(argv)
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
