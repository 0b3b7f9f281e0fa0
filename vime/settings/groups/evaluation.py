"""Evaluation between rollout batches."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.checks import above, above_up_to, all_or_at_least, at_least, dotted_path, place
from vime.settings.flag import flag


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation between rollout batches. What is left out follows the rollout's setting."""

    eval_interval: int | None = flag(
        None, "Evaluate after every N rollout batches and after the last one.", check=at_least(1)
    )
    eval_prompt_data: tuple[str, ...] | None = flag(
        None, "Names and paths of the data sets: NAME PATH NAME PATH ...", check=place
    )
    eval_config: str | None = flag(
        None, "YAML file with data sets and their own settings; it takes the place of --eval-prompt-data.", check=place
    )
    skip_eval_before_train: bool = flag(False, "Don't evaluate before the first step.")
    eval_publication_wait: float = flag(
        600.0,
        "Seconds after its beginning in which an evaluation holds up publications until every response is there, so "
        "that one policy version makes all; after that, or with 0, its result may be mixed.",
        check=at_least(0),
    )
    eval_function_path: str | None = flag(
        None,
        "Import path of `f(args, rollout_id, data_source, evaluation=True)` that evaluates in vime's place.",
        check=dotted_path,
    )
    n_samples_per_eval_prompt: int = flag(1, "Samples generated for each prompt.", check=at_least(1))
    eval_temperature: float | None = flag(None, "Sampling temperature.", check=at_least(0))
    eval_top_p: float | None = flag(None, "Nucleus sampling mass.", check=above_up_to(0, 1))
    eval_top_k: int | None = flag(None, "Sample among the k most probable tokens.", check=all_or_at_least(1))
    eval_max_response_len: int | None = flag(None, "Most tokens of one response.", check=at_least(1))
    eval_max_prompt_len: int | None = flag(None, "Leave longer prompts out, in tokens.", check=at_least(1))
    eval_min_new_tokens: int | None = flag(None, "Fewest tokens of one response.", check=at_least(0))
    eval_max_context_len: int | None = flag(None, "Most tokens of prompt and response together.", check=above(0))
    eval_input_key: str | None = flag(None, "Field of a record that holds the prompt.")
    eval_label_key: str | None = flag(None, "Field of a record that holds the label.")
    eval_tool_key: str | None = flag(None, "Field of a record that holds tool definitions.")
    eval_reward_key: str | None = flag(None, "Key of the reward to report, when the reward is a dict.")
