"""`--eval-config`."""

from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.parse import parse_settings
from vime.settings.schemas.eval_config import eval_datasets, read_eval_config

FILE = """
eval:
  defaults:
    temperature: 0.6
    n_samples_per_eval_prompt: 4
    rm_type: deepscaler
  datasets:
    - name: aime
      path: aime.jsonl
      temperature: 0.0
      metadata_overrides: {source_name: aime}
    - name: gpqa
      path: gpqa.parquet
      rm_type: gpqa
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "eval.yaml"


def test_a_data_set_wins_over_defaults_eval_flags_and_rollout_flags_in_that_order(file: Path) -> None:
    file.write_text(FILE)
    settings = parse_settings(
        ["--rollout-temperature", "1.5", "--rollout-top-p", "0.8", "--rollout-max-response-len", "100", "--rm-type",
         "random", "--eval-temperature", "0.9", "--eval-top-p", "0.7", "--n-samples-per-eval-prompt", "2",
         "--input-key", "prompt", "--eval-label-key", "answer", "--rollout-stop", "</s>"]
    )  # fmt: skip
    aime, gpqa = eval_datasets(str(file), settings)
    assert aime.temperature == 0.0
    assert gpqa.temperature == 0.6
    assert (aime.top_p, aime.n_samples_per_eval_prompt) == (0.7, 4)
    assert (aime.rm_type, gpqa.rm_type) == ("deepscaler", "gpqa")
    assert (aime.max_response_len, aime.input_key, aime.label_key) == (100, "prompt", "answer")
    assert aime.metadata_overrides == {"source_name": "aime", "rm_type": "deepscaler"}
    assert gpqa.metadata_overrides == {"rm_type": "gpqa"}
    assert aime.stop == ["</s>"]
    assert aime.min_new_tokens is None


def test_the_first_place_that_names_a_reward_decides_which_kind_it_is(file: Path) -> None:
    file.write_text("eval: {datasets: [{name: a, path: a, rm_type: math}, {name: b, path: b}]}")
    named, other = eval_datasets(str(file), parse_settings(["--custom-rm-path", "own.reward"]))
    assert (named.rm_type, named.custom_rm_path) == ("math", None)
    assert (other.rm_type, other.custom_rm_path, other.metadata_overrides) == (None, "own.reward", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: {datasets: []}", r"eval\.datasets is empty"),
        ("eval: {defaults: {}}", "eval has no datasets"),
        ("eval: {defaults: {temprature: 1}, datasets: [{name: a, path: b}]}",
         r"eval\.defaults has the unknown key temprature, allowed: .*; the nearest one is temperature"),
        ("eval: {datasets: [{name: a, path: b, top: 1}]}", r"eval\.datasets\[0\] has the unknown key top"),
        ("eval: {datasets: [{name: a}]}", r"eval\.datasets\[0\] has no path"),
        ("eval: {datasets: [{name: a, path: b}, {name: a, path: c}]}", r"eval\.datasets\[1\]\.name is 'a' again"),
        ("eval: {datasets: [{name: a, path: b, top_p: 0}]}", r"eval\.datasets\[0\]\.top_p is 0.*, allowed: more than"),
        ("eval: {defaults: {top_k: 0}, datasets: [{name: a, path: b}]}", r"eval\.defaults\.top_k is 0, allowed: -1"),
        ("eval: {datasets: [{name: a, path: b, temperature: -1}]}", "temperature is -1"),
        ("eval: {datasets: [{name: a, path: b, max_response_len: 0}]}", "max_response_len is 0, allowed: 1 or more"),
        ("eval: {datasets: [{name: a, path: b, stop: 3}]}", r"eval\.datasets\[0\]\.stop is 3, allowed: a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_eval_config(str(file))
    assert str(file) in caught.value.message
