"""`--eval-config`: evaluation data sets and their own settings."""

from __future__ import annotations

from typing import Any

import msgspec

from vime.settings.groups import Settings
from vime.settings.schemas.typed_yaml import Strict, read_typed, refuse

FLAG = "--eval-config"
_REWARD = ("rm_type", "custom_rm_path")


class EvalOptions(Strict, frozen=True, kw_only=True):
    """What `defaults` may hold and a data set may override; None leaves it to the next place."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    reward_key: str | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    max_context_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None


class EvalDataset(EvalOptions, frozen=True, kw_only=True):
    """One data set. `metadata_overrides` are set in each sample's metadata."""

    name: str
    path: str
    metadata_overrides: dict[str, Any] = msgspec.field(default_factory=dict)


class EvalTable(Strict, frozen=True):
    """The `eval` table."""

    datasets: list[EvalDataset]
    defaults: EvalOptions = EvalOptions()


class EvalConfig(Strict, frozen=True):
    """The file."""

    eval: EvalTable


def read_eval_config(path: str) -> EvalConfig:
    """Read and check the file.

    Raises:
        SettingsError: as `read_typed`, no data set, two of one name, or a value out of range.
    """
    config = read_typed(FLAG, path, EvalConfig)
    if not config.eval.datasets:
        raise refuse(path, "eval.datasets", "is empty, allowed: one data set or more")
    _check_ranges(config.eval.defaults, path, "eval.defaults")
    seen: set[str] = set()
    for index, dataset in enumerate(config.eval.datasets):
        place = f"eval.datasets[{index}]"
        if dataset.name in seen:
            raise refuse(path, f"{place}.name", f"is {dataset.name!r} again, allowed: a name of its own")
        seen.add(dataset.name)
        _check_ranges(dataset, path, place)
    return config


def eval_datasets(path: str, settings: Settings) -> tuple[EvalDataset, ...]:
    """The file's data sets with every option filled in: its own, then defaults, then eval flags, then rollout flags.

    Raises:
        SettingsError: as `read_eval_config`.
    """
    config = read_eval_config(path)
    return tuple(with_fallbacks(dataset, config.eval.defaults, settings) for dataset in config.eval.datasets)


def with_fallbacks(dataset: EvalDataset, defaults: EvalOptions, settings: Settings) -> EvalDataset:
    """The data set with every option that it leaves out taken from the first place that has it.

    The reward is one choice: the first place that has `custom_rm_path` or `rm_type` decides both. An `rm_type` of the
    file goes before that of a record.
    """
    places = (msgspec.structs.asdict(defaults), _eval_flags(settings), _rollout_flags(settings))
    filled = msgspec.structs.asdict(dataset)
    filled |= _reward_choice(filled, *places)
    if filled["rm_type"] is not None and filled["rm_type"] in (dataset.rm_type, defaults.rm_type):
        filled["metadata_overrides"] = {"rm_type": filled["rm_type"], **dataset.metadata_overrides}
    for key, value in filled.items():
        if key in _REWARD:
            continue
        if value is None:
            filled[key] = next((place[key] for place in places if place.get(key) is not None), None)
    return EvalDataset(**filled)


def _reward_choice(*places: dict[str, Any]) -> dict[str, Any]:
    for place in places:
        if any(place.get(key) is not None for key in _REWARD):
            return {key: place.get(key) for key in _REWARD}
    return dict.fromkeys(_REWARD)


def _eval_flags(settings: Settings) -> dict[str, Any]:
    evaluation = settings.evaluation
    return {
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": evaluation.eval_top_p,
        "top_k": evaluation.eval_top_k,
        "max_response_len": evaluation.eval_max_response_len,
        "max_prompt_len": evaluation.eval_max_prompt_len,
        "max_context_len": evaluation.eval_max_context_len,
        "min_new_tokens": evaluation.eval_min_new_tokens,
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "tool_key": evaluation.eval_tool_key,
        "reward_key": evaluation.eval_reward_key,
    }


def _rollout_flags(settings: Settings) -> dict[str, Any]:
    rollout, data = settings.rollout, settings.data
    return {
        "rm_type": rollout.rm_type,
        "custom_rm_path": rollout.custom_rm_path,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "max_response_len": rollout.rollout_max_response_len,
        "max_prompt_len": data.rollout_max_prompt_len,
        "max_context_len": rollout.rollout_max_context_len,
        "stop": None if rollout.rollout_stop is None else list(rollout.rollout_stop),
        "stop_token_ids": None if rollout.rollout_stop_token_ids is None else list(rollout.rollout_stop_token_ids),
        "input_key": data.input_key,
        "label_key": data.label_key,
        "tool_key": data.tool_key,
        "metadata_key": data.metadata_key,
        "reward_key": rollout.reward_key,
    }


def _check_ranges(options: EvalOptions, path: str, place: str) -> None:
    for key in ("n_samples_per_eval_prompt", "max_response_len", "max_prompt_len", "max_context_len"):
        value = msgspec.structs.asdict(options)[key]
        if value is not None and value < 1:
            raise refuse(path, f"{place}.{key}", f"is {value}, allowed: 1 or more")
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        raise refuse(path, f"{place}.temperature", f"is {options.temperature}, allowed: a finite number, 0 or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise refuse(path, f"{place}.top_p", f"is {options.top_p}, allowed: more than 0, 1 or less")
    if options.top_k is not None and options.top_k != -1 and options.top_k < 1:
        raise refuse(path, f"{place}.top_k", f"is {options.top_k}, allowed: -1, or 1 or more")
    if options.min_new_tokens is not None and options.min_new_tokens < 0:
        raise refuse(path, f"{place}.min_new_tokens", f"is {options.min_new_tokens}, allowed: 0 or more")
