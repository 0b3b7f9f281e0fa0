"""From command line and files to `Settings`, with the source of each value."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime.errors import SettingsError
from vime.settings.extra_args import flags_added_by
from vime.settings.files import read_config, read_custom_config
from vime.settings.flag import Kind, flags_of
from vime.settings.groups import GROUPS, Settings, all_flags
from vime.settings.parser import build_parser
from vime.settings.passed_on import PassedOn, own_flag_names, share_out
from vime.settings.values import check_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a value comes from. `detail` is the file's path, or the reason of a derived value."""

    kind: Literal["default", "file", "flag", "derived"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.detail}" if self.detail else self.kind


DEFAULT = Source("default")
GIVEN = Source("flag")


@dataclass(frozen=True)
class Resolved:
    """Settings, and flag name -> source for every flag."""

    settings: Settings
    sources: Mapping[str, Source]

    def is_given(self, field: str) -> bool:
        """Whether the user gave the field a value, on the command line or in a file."""
        return self.sources[all_flags()[field][1].name].kind in ("file", "flag")

    def derive(self, reason: str, **values: Any) -> Resolved:
        """The same with fields changed because of others; `reason` is for the record, for example "--colocate"."""
        settings, sources = self.settings, dict(self.sources)
        for field, value in values.items():
            group, described = all_flags()[field]
            changed = dataclasses.replace(vars(settings)[group], **{field: value})
            settings = dataclasses.replace(settings, **{group: changed})
            sources[described.name] = Source("derived", reason)
        return Resolved(settings, sources)


def resolve(argv: Sequence[str]) -> Resolved:
    """Parse the flags, read the files they name, and check each value by itself.

    A value comes, in rising order, from the flag's default, the `--config` file, the command line, and the
    `--custom-config-path` file.

    Raises:
        SettingsError: an unknown flag or key, a wrong type, choice or range, a stray word, an unreadable file.
    """
    namespace, rest = build_parser().parse_known_args(list(argv))
    given = checked_values(vars(namespace))
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    passed_on = PassedOn()
    if given.get("config") is not None:
        in_file, passed_on = read_config(given["config"])
        _overlay(values, sources, in_file, Source("file", given["config"]))
    _overlay(values, sources, given, GIVEN)
    passed_on.extend(share_out(rest, _extra_flags(values)))
    custom_path = values.get("custom_config_path")
    if custom_path is not None:
        in_file, for_others = read_custom_config(custom_path)
        _log_custom(custom_path, values, in_file, for_others)
        _overlay(values, sources, in_file, Source("file", custom_path))
        passed_on.extend(for_others)
    return _derived(Resolved(_settings(values, passed_on), _all_sources(sources)))


def _derived(resolved: Resolved) -> Resolved:
    """With what follows from other fields, unless the user says it."""
    settings = resolved.settings
    if settings.objective.is_supervised and not resolved.is_given("rollout_num_gpus"):
        resolved = resolved.derive("--loss-type sft_loss", rollout_num_gpus=0)
    if settings.cluster.engines_leave_memory and not resolved.is_given("max_staleness"):
        # What runs when engines fall asleep is thrown away, so no more is begun than the next batch needs.
        resolved = resolved.derive("engines that sleep while the trainer trains", max_staleness=0)
    return resolved


def _extra_flags(values: Mapping[str, Any]) -> frozenset[str]:
    """Flags of the user's own Megatron. Raises `SettingsError` when one of them is vime's already."""
    path = values.get("extra_args_provider_path")
    added = frozenset() if path is None else frozenset(flags_added_by(path))
    taken = sorted(added & own_flag_names())
    if taken:
        raise SettingsError(
            f"--extra-args-provider-path {path} adds {taken[0]}, which is a flag of vime.",
            next_step="Rename it in the function.",
        )
    return added


def checked_values(given: dict[str, Any]) -> dict[str, Any]:
    """Values from the command line, lists as tuples, each in its range. Raises `SettingsError` for one that is not."""
    result = {}
    for field, value in given.items():
        _, described = all_flags()[field]
        result[field] = tuple(value) if described.kind in (Kind.LIST, Kind.REPEATED) else value
        check_value(described, result[field], described.name)
    return result


def _overlay(values: dict[str, Any], sources: dict[str, Source], new: Mapping[str, Any], source: Source) -> None:
    values.update(new)
    sources.update(dict.fromkeys(new, source))


def _log_custom(path: str, before: Mapping[str, Any], values: Mapping[str, Any], for_others: PassedOn) -> None:
    for field, value in values.items():
        if field == "custom_config_path":
            raise SettingsError(f"{path}: {field} can't name another file.", next_step="Remove the key.")
        _, described = all_flags()[field]
        shown = "***" if described.secret else value
        if field in before:
            old = "***" if described.secret else before[field]
            logger.warning("%s sets %s to %s, over %s", path, field, shown, old)
        else:
            logger.info("%s sets %s to %s", path, field, shown)
    for words in (for_others.vllm, for_others.router, for_others.megatron):
        if words:
            logger.info("%s adds %s", path, " ".join(words))


def _settings(values: Mapping[str, Any], passed_on: PassedOn) -> Settings:
    groups: dict[str, Any] = {
        name: group(**{flag.field: values[flag.field] for flag in flags_of(group) if flag.field in values})
        for name, group in GROUPS.items()
    }
    return Settings(
        **groups,
        vllm_args=tuple(passed_on.vllm),
        router_args=tuple(passed_on.router),
        megatron_args=tuple(passed_on.megatron),
    )


def _all_sources(sources: Mapping[str, Source]) -> dict[str, Source]:
    return {described.name: sources.get(field, DEFAULT) for field, (_, described) in all_flags().items()}
