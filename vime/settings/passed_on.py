"""Flags that aren't vime's: whose they are, and whether they are misspelt ones of vime."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from vime.errors import SettingsError
from vime.settings.groups import Settings, all_flags

MEGATRON_FLAGS_FILE = "megatron_flags.json"
"""Data file with Megatron's flags, made by `scripts/list_megatron_flags.py`."""

_CLOSE = 2
"""Edits up to which an unknown flag counts as a misspelt one of vime."""

_SIMILAR = 0.65
"""Share of letters in common, by `difflib`, below which a name is not taken for a misspelt one."""


@dataclass
class PassedOn:
    """Words for others, in order."""

    vllm: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    megatron: list[str] = field(default_factory=list)

    def owner_of(self, flag: str) -> list[str]:
        if flag.startswith("--vllm-"):
            return self.vllm
        return self.router if flag.startswith("--router-") else self.megatron

    def extend(self, other: PassedOn) -> None:
        """Append the words of `other`; its flags take the place of earlier ones."""
        self.vllm = _without(self.vllm, other.vllm) + other.vllm
        self.router = _without(self.router, other.router) + other.router
        self.megatron = _without(self.megatron, other.megatron) + other.megatron


def _without(words: Sequence[str], newer: Sequence[str]) -> list[str]:
    """`words` less the flags, with their values, that `newer` gives too."""
    given = {word.partition("=")[0] for word in newer if word.startswith("--")}
    kept, keep = [], True
    for word in words:
        if word.startswith("--"):
            keep = word.partition("=")[0] not in given
        if keep:
            kept.append(word)
    return kept


def share_out(words: Sequence[str], extra_flags: Collection[str] = ()) -> tuple[PassedOn, list[SettingsError]]:
    """Share out the words that vime's parser left over: each flag goes with the values that follow it.

    The first word is a flag. `extra_flags` are known besides Megatron's listed ones; see `vime.settings.extra_args`.
    What looks like a misspelt flag of vime goes to nobody and becomes an error.
    """
    result, errors = PassedOn(), list[SettingsError]()
    target: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            misspelt = None if flag in extra_flags else _misspelt(flag)
            target = result.owner_of(word) if misspelt is None else []
            errors += [] if misspelt is None else [misspelt]
        target.append(word)
    return result, errors


def unknown_flags(settings: Settings, megatron_flags: frozenset[str]) -> dict[str, str]:
    """Flags in `megatron_args` that are not in `megatron_flags` -> the nearest flag of vime or Megatron, or ""."""
    given = (word.partition("=")[0] for word in settings.megatron_args if word.startswith("--"))
    known = {*own_flag_names(), *megatron_flags}
    return {name: nearest(name, known) for name in given if name not in megatron_flags}


def nearest(word: str, known: Iterable[str]) -> str:
    """The most similar one of `known`, dashes at the beginning aside; empty where none is similar."""
    plain = {name.lstrip("-"): name for name in known}
    found = difflib.get_close_matches(word.lstrip("-"), plain, n=1, cutoff=_SIMILAR)
    return plain[found[0]] if found else ""


def nearest_words(word: str, known: Iterable[str]) -> str:
    """`; the nearest one is X`, or nothing."""
    near = nearest(word, known)
    return near and f"; the nearest one is {near}"


_SGLANG = "--sglang-"
_VLLM_OF_SGLANG = {
    "mem-fraction-static": "gpu-memory-utilization",
    "context-length": "max-model-len",
    "max-running-requests": "max-num-seqs",
    "chunked-prefill-size": "max-num-batched-tokens",
}
"""Options of SGLang -> what comes nearest to them in vLLM."""


def is_of_sglang(flag: str) -> bool:
    """Whether a launch script gives the flag to another engine than vime's."""
    return flag.startswith(_SGLANG)


def vllm_flag_of(sglang_flag: str) -> str:
    """The flag of vLLM that comes nearest to one of SGLang's; empty where none is known."""
    option = _VLLM_OF_SGLANG.get(sglang_flag.removeprefix(_SGLANG))
    return f"--vllm-{option}" if option is not None else ""


@functools.cache
def own_flag_names() -> frozenset[str]:
    """Every spelling of every flag of vime."""
    return frozenset(name for _, described in all_flags().values() for name in described.names)


@functools.cache
def listed_megatron_flags() -> frozenset[str]:
    """Flags of the Megatron that `listed_megatron_version` names, without importing it."""
    return frozenset(_listed()["flags"])


@functools.cache
def listed_megatron_names() -> frozenset[str]:
    """Attribute names of Megatron's arguments: `layernorm_epsilon` for --norm-epsilon."""
    return frozenset(_listed()["destinations"])


@functools.cache
def listed_megatron_version() -> str:
    return str(_listed()["version"])


def _listed() -> dict[str, list[str] | str]:
    content = importlib.resources.files("vime.settings").joinpath(MEGATRON_FLAGS_FILE).read_text()
    listed: dict[str, list[str] | str] = json.loads(content)
    return listed


def _misspelt(flag: str) -> SettingsError | None:
    if flag in listed_megatron_flags():
        return None
    plain = flag.replace("_", "-")
    close = [name for name in own_flag_names() if edit_distance(plain, name, _CLOSE) <= _CLOSE]
    close += [name for name in own_flag_names() if len(plain) > len("--vllm-") and name.startswith(plain)]
    if not close:
        return None
    meant = min(close, key=lambda name: (edit_distance(plain, name, len(name)), name))
    return SettingsError(
        f"{flag} is not a flag; the nearest one is {meant}.", next_step="`vime train --help` lists every flag."
    )


def edit_distance(left: str, right: str, limit: int) -> int:
    """Insertions, deletions and replacements that turn one word into the other; anything above `limit` may be more."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    previous = list(range(len(right) + 1))
    for row, letter in enumerate(left, start=1):
        current = [row]
        for column, other in enumerate(right, start=1):
            replaced = previous[column - 1] + (letter != other)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]
