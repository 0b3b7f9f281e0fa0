"""Which data sets are evaluated, and with what."""

from pathlib import Path

from vime.settings.parse import parse_settings
from vime.settings.schemas.eval_sets import evaluation_sets

FLAGS = [
    "--rollout-temperature", "1.2", "--rollout-max-response-len", "9", "--input-key", "prompt", "--rm-type", "math",
    "--eval-temperature", "0", "--eval-top-p", "0.8", "--eval-top-k", "5", "--eval-max-response-len", "7",
    "--eval-max-prompt-len", "6", "--eval-min-new-tokens", "2", "--eval-max-context-len", "20",
    "--eval-input-key", "question", "--eval-label-key", "answer", "--eval-tool-key", "functions",
    "--eval-reward-key", "acc", "--n-samples-per-eval-prompt", "3",
]  # fmt: skip


def test_nothing_is_evaluated_unless_a_data_set_is_named() -> None:
    assert evaluation_sets(parse_settings(FLAGS)) == ()


def test_each_named_file_is_evaluated_with_the_eval_flags() -> None:
    first, second = evaluation_sets(parse_settings([*FLAGS, "--eval-prompt-data", "a", "a.jsonl", "b", "b.parquet"]))
    assert (first.name, first.path, second.name, second.path) == ("a", "a.jsonl", "b", "b.parquet")
    assert (first.temperature, first.top_p, first.top_k) == (0, 0.8, 5)
    assert (first.max_response_len, first.max_prompt_len, first.min_new_tokens) == (7, 6, 2)
    assert (first.max_context_len, first.n_samples_per_eval_prompt) == (20, 3)
    assert (first.input_key, first.label_key, first.tool_key, first.reward_key) == (
        "question", "answer", "functions", "acc"
    )  # fmt: skip
    assert (first.rm_type, first.metadata_overrides) == ("math", {})


def test_the_file_of_data_sets_goes_before_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("eval: {datasets: [{name: c, path: c.jsonl}]}")
    argv = [*FLAGS, "--eval-prompt-data", "a", "a.jsonl", "--eval-config", str(file)]
    assert [data_set.name for data_set in evaluation_sets(parse_settings(argv))] == ["c"]
