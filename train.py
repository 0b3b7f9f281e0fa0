"""Root entry point for launch scripts: `python train.py ...` is `vime train ...`."""

import sys

from vime.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
