"""From command line and files to `Settings`, with the source of each value."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime.errors import SettingsError, joined
from vime.settings.extra_args import flags_added_by
from vime.settings.files import FileEntries, config_entries, custom_config_entries
from vime.settings.flag import Kind, flags_of
from vime.settings.groups import GROUPS, Settings, all_flags
from vime.settings.parser import parse_words
from vime.settings.passed_on import PassedOn, own_flag_names, share_out
from vime.settings.values import check_value

SETTINGS = "settings can't work"
"""What several wrong ones are counted as."""

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
        SettingsError: unknown flags or keys, wrong types, choices or ranges, stray words, unreadable files.
    """
    resolved, errors = resolve_all(argv)
    if errors:
        raise joined(errors, SETTINGS)
    return resolved


def resolve_all(argv: Sequence[str]) -> tuple[Resolved, list[SettingsError]]:
    """As `resolve`: what is right, and what is wrong with the rest, which has its default."""
    parsed, rest, errors = parse_words(argv)
    given, wrong = checked_values(parsed)
    errors += wrong
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    passed_on = PassedOn()
    if given.get("config") is not None:
        entries = _read(config_entries, given["config"], errors)
        passed_on = entries.passed_on
        _overlay(values, sources, entries.values, Source("file", given["config"]))
    _overlay(values, sources, given, GIVEN)
    shared, wrong = share_out(rest, _extra_flags(values, errors))
    errors += wrong
    passed_on.extend(shared)
    custom_path = values.get("custom_config_path")
    if custom_path is not None:
        entries = _read(custom_config_entries, custom_path, errors)
        _log_custom(custom_path, values, entries, errors)
        _overlay(values, sources, entries.values, Source("file", custom_path))
        passed_on.extend(entries.passed_on)
    return _derived(Resolved(_settings(values, passed_on), _all_sources(sources))), errors


def _read(read: Callable[[str], FileEntries], path: str, errors: list[SettingsError]) -> FileEntries:
    """What a file says; nothing where it can't be read. Errors of both kinds go to `errors`."""
    try:
        entries = read(path)
    except SettingsError as error:
        errors.append(error)
        return FileEntries()
    errors += entries.errors
    return entries


def _derived(resolved: Resolved) -> Resolved:
    """With what follows from other fields, unless the user says it."""
    settings = resolved.settings
    if settings.objective.is_supervised and not resolved.is_given("rollout_num_gpus"):
        resolved = resolved.derive("--loss-type sft_loss", rollout_num_gpus=0)
    if settings.cluster.engines_leave_memory and not resolved.is_given("max_staleness"):
        # What runs when engines fall asleep is thrown away, so no more is begun than the next batch needs.
        resolved = resolved.derive("engines that sleep while the trainer trains", max_staleness=0)
    return resolved


def _extra_flags(values: dict[str, Any], errors: list[SettingsError]) -> frozenset[str]:
    """Flags of the user's own Megatron; `errors` gets those that are vime's already, and why there are none.

    A provider that can't be used is taken out of `values`.
    """
    path = values.get("extra_args_provider_path")
    if path is None:
        return frozenset()
    try:
        added = frozenset(flags_added_by(path))
    except SettingsError as error:
        errors.append(error)
        del values["extra_args_provider_path"]
        return frozenset()
    errors += [
        SettingsError(
            f"--extra-args-provider-path {path} adds {flag}, which is a flag of vime.",
            next_step="Rename it in the function.",
        )
        for flag in sorted(added & own_flag_names())
    ]
    return added


def checked_values(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[SettingsError]]:
    """Values from the command line, lists as tuples, that are in their range, and an error for each other one."""
    result, errors = dict[str, Any](), list[SettingsError]()
    for field, value in given.items():
        _, described = all_flags()[field]
        converted = tuple(value) if described.kind in (Kind.LIST, Kind.REPEATED) else value
        try:
            check_value(described, converted, described.name)
        except SettingsError as error:
            errors.append(error)
        else:
            result[field] = converted
    return result, errors


def _overlay(values: dict[str, Any], sources: dict[str, Source], new: Mapping[str, Any], source: Source) -> None:
    values.update(new)
    sources.update(dict.fromkeys(new, source))


def _log_custom(path: str, before: Mapping[str, Any], entries: FileEntries, errors: list[SettingsError]) -> None:
    for_others = entries.passed_on
    for field, value in entries.values.items():
        if field == "custom_config_path":
            errors.append(SettingsError(f"{path}: {field} can't name another file.", next_step="Remove the key."))
            continue
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
