"""Rows for rotary embeddings.

transformers 5 keeps their settings in `rope_parameters`; earlier ones in `rope_scaling` and at the top level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vime.errors import ModelError
from vime.models.rows import Config, Row, Shape, Value, fixed, number

# What Megatron has no flag for; its own constants.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_PARTIAL = 0.5
"""Part of a head that is rotated in a model which doesn't say."""

Variant = Literal["default", "partial", "llama3", "yarn"]


def rope_rows(variant: Variant = "default") -> tuple[Row, ...]:
    """Rows of a family whose models use the default rotary embedding or, in some members, the variant."""
    base = Row("--rotary-base", int, "rope_theta", _reader(variant, _base), _write_base)
    return (base, *_VARIANT_ROWS[variant])


def _rope(config: Config) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _kind(config: Config) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def _reader(variant: Variant, read: Callable[[Config], Value]) -> Callable[[Config], Value]:
    allowed = ("default", variant) if variant in ("llama3", "yarn") else ("default",)

    def checked(config: Config) -> Value:
        if _kind(config) not in allowed:
            raise ModelError(f"config.json: rope type is {_kind(config)!r}, allowed: {', '.join(allowed)}.")
        return read(config)

    return checked


def _base(config: Config) -> int:
    base = number({"rope_theta": config.get("rope_theta", 10_000.0), **_rope(config)}, "rope_theta")
    if base != int(base):
        raise ModelError(f"config.json: rope_theta is {base}, allowed: a whole number.")
    return int(base)


def _write_base(shape: Shape) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(shape["--rotary-base"])}}


def _percent(config: Config) -> float:
    return number(
        {"partial_rotary_factor": config.get("partial_rotary_factor", _PARTIAL), **_rope(config)},
        "partial_rotary_factor",
    )


def _write_percent(shape: Shape) -> dict[str, Any]:
    return {"rope_parameters": {"partial_rotary_factor": shape["--rotary-percent"]}}


def _is_llama3(config: Config) -> bool:
    return _kind(config) == "llama3"


def _llama3_factor(config: Config) -> float | None:
    return _scaled(config, _LLAMA3)["factor"] if _is_llama3(config) else None


def _write_llama3(shape: Shape) -> dict[str, Any]:
    if "--use-rope-scaling" not in shape:
        return {}
    return {"rope_parameters": {"rope_type": "llama3", "factor": shape.get("--rope-scaling-factor", 8.0), **_LLAMA3}}


def _yarn_type(config: Config) -> str:
    return "yarn" if _kind(config) == "yarn" else "rope"


def _yarn_value(key: str) -> Callable[[Config], float | None]:
    defaults = {"mscale": 1.0, "mscale_all_dim": 0.0}
    return lambda config: float({**defaults, **_scaled(config, _YARN)}[key]) if _kind(config) == "yarn" else None


def _write_yarn(shape: Shape) -> dict[str, Any]:
    if shape.get("--rope-type") != "yarn":
        return {}
    values = {"factor": shape["--rotary-scaling-factor"], "mscale": shape["--mscale"]}
    return {"rope_parameters": {"rope_type": "yarn", **values, "mscale_all_dim": shape["--mscale-all-dim"], **_YARN}}


def _scaled(config: Config, constants: dict[str, Any]) -> dict[str, Any]:
    """The scaling's entries, after a check of those that Megatron has no flag for."""
    rope = _rope(config)
    for key, value in constants.items():
        if rope.get(key, value) != value:
            raise ModelError(f"config.json: {key} is {rope[key]} in the rope settings, allowed: {value}.")
    if not isinstance(rope.get("factor"), int | float):
        raise ModelError(f"config.json: factor is {rope.get('factor')!r} in the rope settings, allowed: a number.")
    return {**rope, "factor": float(rope["factor"])}


_VARIANT_ROWS: dict[Variant, tuple[Row, ...]] = {
    "default": (),
    "partial": (
        Row("--rotary-percent", float, "partial_rotary_factor", _percent, _write_percent),
        fixed("--rotary-interleaved", True),
    ),
    "llama3": (
        Row("--use-rope-scaling", bool, "rope_type", _is_llama3, _write_llama3),
        Row("--rope-scaling-factor", float, "factor", _llama3_factor, lambda _: {}),
    ),
    "yarn": (
        Row("--rope-type", str, "rope_type", _yarn_type, _write_yarn),
        Row("--rotary-scaling-factor", float, "factor", _yarn_value("factor"), lambda _: {}),
        Row("--mscale", float, "mscale", _yarn_value("mscale"), lambda _: {}),
        Row("--mscale-all-dim", float, "mscale_all_dim", _yarn_value("mscale_all_dim"), lambda _: {}),
    ),
}
