"""How tables are printed."""

import pytest
from rich.console import Group
from rich.text import Text

from vime.cli.look import first_of, show, table


def test_a_table_that_goes_into_a_pipe_breaks_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    place = "/data/" + "long/" * 80 + "prompts.jsonl:1"
    show(Group(table(("group", "prompt", "message"), [(1, place, "word " * 100)] * 50), Text("tail " * 100)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 50 + 1
    assert all(place in line for line in lines[1:-1])
    assert max(map(len, lines)) < 1200


def test_a_long_list_of_groups_says_how_much_it_hides() -> None:
    assert first_of([3, 4]) == "3, 4"
    assert first_of(list(range(4000))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3990 more"
