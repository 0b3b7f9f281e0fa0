"""`Settings` from a command line, and the view of them that user hooks get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from vime.settings.groups import GROUPS, Settings
from vime.settings.resolve import resolve


def parse_settings(argv: Sequence[str]) -> Settings:
    """Settings of a command line, without their sources. Raises `SettingsError` as `resolve` does."""
    return resolve(argv).settings


class HookArgs:
    """Read-only flat view of the settings, for user hooks: `args.hf_checkpoint`, `args.rollout_temperature`, ...

    With `megatron`, a function that returns Megatron's arguments, it also has those (`args.padded_vocab_size`,
    `args.tensor_model_parallel_size`, flags of an `extra_args_provider`). The function is called when the first of
    them is asked for, because it imports Megatron; `megatron_names` are theirs. vime's names win.

    In a run whose routers have started `args.vllm_router_ip` and `args.vllm_router_port` are those of the trained
    model's, and `args.vllm_model_routers` maps the name of each served model to host and port.
    """

    def __init__(
        self,
        settings: Settings,
        megatron: Callable[[], Mapping[str, Any]] | None = None,
        megatron_names: Collection[str] = (),
    ) -> None:
        flat: dict[str, Any] = {}
        for name in GROUPS:
            flat.update(dataclasses.asdict(vars(settings)[name]))
        flat["vllm_model_routers"] = {r.model: (r.host, r.port) for r in settings.model_routers}
        object.__setattr__(self, "_values", flat)
        object.__setattr__(self, "_megatron", megatron)
        object.__setattr__(self, "_megatron_names", frozenset(megatron_names))

    def __getattr__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own.get("_megatron_names", ()) and name not in own["_values"] and own["_megatron"] is not None:
            own["_values"] = {**own["_megatron"](), **own["_values"]}
        try:
            return own["_values"][name]
        except KeyError:
            raise AttributeError(
                f"args has no {name!r}; it holds the documented flags of vime and Megatron's arguments"
            ) from None

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} can't be set from a hook")
