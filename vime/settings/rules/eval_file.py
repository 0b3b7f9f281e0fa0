"""Rule on the content of --eval-config."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.config_files import read_table, tables, unknown_keys
from vime.settings.rules.problem import Problem

_EVAL_DEFAULTS = (
    *("temperature", "top_p", "top_k", "stop", "stop_token_ids"),
    *("max_response_len", "max_prompt_len", "min_new_tokens", "max_context_len", "n_samples_per_eval_prompt"),
    *("input_key", "label_key", "tool_key", "metadata_key", "metadata_overrides", "reward_key", "rm_type"),
    *("custom_rm_path", "custom_generate_function_path", "apply_chat_template", "apply_chat_template_kwargs"),
)
"""Keys of `eval: defaults`; a data set may have them too."""


def evaluation_file_names_data_sets(settings: Settings) -> Iterator[Problem]:
    """YAML: `eval: {defaults: {...}, datasets: [{name, path, ...}]}`."""
    flag, path = "--eval-config", settings.evaluation.eval_config
    if path is None:
        return
    content = read_table(flag, path)
    if isinstance(content, Problem):
        yield content
        return
    evaluation = content.get("eval")
    if not isinstance(evaluation, dict):
        yield Problem(
            (flag,), f"{path}: eval is {evaluation!r}", "a table", "", "Put defaults and datasets under eval."
        )
        return
    yield from unknown_keys(flag, f"{path}: eval", evaluation, ("defaults", "datasets"))
    yield from unknown_keys(flag, f"{path}: eval.defaults", evaluation.get("defaults") or {}, _EVAL_DEFAULTS)
    data_sets = tables(flag, path, evaluation, "datasets")
    if isinstance(data_sets, Problem):
        yield data_sets
        return
    for number, data_set in enumerate(data_sets, start=1):
        where = f"{path}: data set {number}"
        yield from unknown_keys(flag, where, data_set, {*_EVAL_DEFAULTS, "name", "path"})
        for key in ("name", "path"):
            if not isinstance(data_set.get(key), str):
                yield Problem((flag,), f"{where}: {key} is {data_set.get(key)!r}", "text", "", f"Give it a {key}.")


RULES = (evaluation_file_names_data_sets,)
