"""`vime import-script run.sh`: a bash launch script as a file for `vime train --config`."""

from __future__ import annotations

import sys

from vime.cli.help_text import help_parser, place
from vime.outputs import write_output
from vime.settings.script.reader import read_launch_script
from vime.settings.script.to_file import settings_tables, toml_text


def import_script(words: list[str]) -> int:
    """Run the command; the exit status. What could not be mapped goes to stderr and into the file's first lines."""
    parser = help_parser(
        "vime import-script",
        "Turn a bash launch script into a file for `vime train --config`. The script is read, never run. "
        'Words after -- stand for the script\'s own, its "$@".',
        ["vime import-script run.sh --output run.toml", "vime import-script run.sh -- --lr 1e-6 | less"],
        usage="vime import-script [-h] [--output FILE] SCRIPT [-- WORD ...]",
    )
    parser.add_argument("script", type=place, metavar="SCRIPT", help="bash script that runs `python train.py FLAG ...`")
    parser.add_argument(
        "--output", type=place, default=None, metavar="FILE", help="file to write; standard output when left out"
    )
    end = words.index("--") if "--" in words else len(words)
    options, arguments = parser.parse_args(words[:end]), words[end + 1 :]
    tables, notes = settings_tables(read_launch_script(options.script, arguments))
    comments = [f"From {options.script.name}, by `vime import-script`."]
    comments += ["Not taken over as written:", *notes] if notes else []
    text = toml_text(tables, comments)
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    if options.output is None:
        print(text, end="")
        return 0
    write_output("--output", options.output, text)
    settings = sum(len(entries) for entries in tables.values())
    print(f"{options.output}: {settings} settings, {len(notes)} notes.")
    print(f"Check it: vime train --config {options.output} --dry-run")
    return 0
