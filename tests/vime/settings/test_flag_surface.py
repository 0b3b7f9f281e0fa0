"""Which flags there are, and that none is accepted and ignored."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vime.settings.flag import Flag, Kind, flags_of
from vime.settings.groups import GROUPS, Settings, all_flags
from vime.settings.parse import parse_settings
from vime.settings.refusals import REFUSALS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
READ_BY_SETTINGS = {"config", "custom_config_path", "megatron_config_path"}
"""Their files become other settings."""
HAPPENS_ANYWAY = {"buffer_sort_by_staleness"}
"""What the flag asks for is what the queue always does."""


def documented() -> list[tuple[str, str, Any]]:
    lines = (HERE / "documented_flags.tsv").read_text().splitlines()
    rows = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return [(name, kind, json.loads(default)) for name, kind, default in rows]


def by_name() -> dict[str, Flag]:
    return {name: described for _, described in all_flags().values() for name in described.names}


def kind_in_words(described: Flag) -> str:
    if described.kind is Kind.JSON:
        return "json"
    marks = {Kind.OPTIONAL_SWITCH: "?", Kind.LIST: "+", Kind.REPEATED: "*"}
    return described.type.__name__ + marks.get(described.kind, "")


def test_the_flag_names_are_frozen() -> None:
    """A change of the surface is deliberate: it changes `flag_names.txt` too."""
    assert (HERE / "flag_names.txt").read_text().split() == sorted(by_name())


@pytest.mark.parametrize(("name", "kind", "default"), documented(), ids=[row[0] for row in documented()])
def test_documented_flag_has_its_type_and_default(name: str, kind: str, default: Any) -> None:
    described = by_name()[name]
    assert kind_in_words(described) == kind
    found = list(described.default) if isinstance(described.default, tuple) else described.default
    assert found == default
    assert type(found) is type(default)


def test_the_settings_have_a_group_for_every_table() -> None:
    settings = parse_settings([])
    assert list(GROUPS) == [name for name in vars(settings) if not name.endswith(("_args", "_routers"))]
    assert isinstance(settings, Settings)


def test_field_and_flag_names_are_unique_across_groups() -> None:
    flags = [described for group in GROUPS.values() for described in flags_of(group)]
    names = [name for described in flags for name in described.names]
    assert len({described.field for described in flags}) == len(flags)
    assert len(set(names)) == len(names)


def test_every_flag_explains_itself_in_a_sentence() -> None:
    for described in by_name().values():
        assert re.fullmatch(r"\S.*[.]|.*\.\.\.", described.help), described.name


def test_about_a_dozen_flags_come_first_in_the_help() -> None:
    assert 10 <= sum(described.common for _, described in all_flags().values()) <= 14


@pytest.mark.parametrize(("field", "group"), [(field, group) for field, (group, _) in all_flags().items()])
def test_no_flag_is_accepted_and_ignored(field: str, group: str) -> None:
    """Each flag is read by the code, or every value but what happens anyway is refused."""
    _, described = all_flags()[field]
    has_one_value = described.choices is not None and len(described.choices) == 1
    is_refused = described.name in {row.flag for row in REFUSALS}
    if has_one_value or is_refused or field in {*READ_BY_SETTINGS, *HAPPENS_ANYWAY}:
        return
    own_file = (ROOT / "vime" / "settings" / "groups" / f"{group}.py").read_text()
    code = "\n".join(_code_that_uses_settings())
    functions = "\n".join(path.read_text() for path in (ROOT / "vime" / "rollout").rglob("*.py"))
    is_read = (
        re.search(rf"\b{group}\.{field}\b", code)
        or re.search(rf"\bself\.{field}\b", own_file)
        or re.search(rf"\bargs\.{field}\b", functions)
    )
    assert is_read, f"{described.name} is neither read by the code nor in vime/settings/refusals.py"


def _code_that_uses_settings() -> list[str]:
    """All but the settings themselves; the options of evaluation data sets fall back to flags."""
    packages = [ROOT / name for name in ("pipeline", "recovery", "storage", "vime")]
    paths = [path for package in packages for path in package.rglob("*.py")]
    outside = [path for path in paths if not path.is_relative_to(ROOT / "vime" / "settings")]
    options = ROOT / "vime" / "settings" / "schemas"
    return [path.read_text() for path in (*outside, options / "eval_config.py", options / "eval_sets.py")]


def test_a_flag_can_carry_every_kind_of_value() -> None:
    settings = parse_settings(
        [
            *("--rollout-external-engine-addrs", "one:8000", "two:8000", "--no-offload-train", "--offload-rollout"),
            *("--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d"),
            *("--apply-chat-template-kwargs", '{"enable_thinking": false}', "--rollout-stop-token-ids", "1", "2"),
            "--wandb-disable-random-suffix",
        ]
    )
    assert settings.engine.rollout_external_engine_addrs == ("one:8000", "two:8000")
    assert (settings.cluster.offload_train, settings.cluster.offload_rollout) == (False, True)
    assert settings.rollout.rollout_sample_hook_path == ("a.b", "c.d")
    assert settings.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert settings.rollout.rollout_stop_token_ids == (1, 2)
    assert settings.logging.wandb_random_suffix is False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings
