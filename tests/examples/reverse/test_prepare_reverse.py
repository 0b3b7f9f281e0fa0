"""What the `reverse` example writes, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from examples.reverse import prepare as example
from examples.reverse.reward import exact_match
from vime.errors import ModelError, RewardError, SettingsError
from vime.utils.types import Sample


@pytest.fixture(autouse=True)
def short_warm_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(example, "WARM_TARGET", 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_warm_start_leaves_two_answers_in_three_to_learn(tmp_path: Path, seed: int) -> None:
    prepared = example.prepare(tmp_path / "out", seed)
    assert 0.30 <= prepared.exact_match <= 0.38


def test_demonstrations_have_mistakes_at_the_rate_that_is_asked_for() -> None:
    rng = random.Random(0)
    assert all(example.demonstration(n, rng, 0.0) == example.question(n) for n in range(100))
    wrong = sum(example.demonstration(n, rng, 0.5) != example.question(n) for n in range(100))
    assert wrong > 80


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(name) + seed)
        example.prepare(tmp_path / name, seed, num_prompts=20)
    contents = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*s*")}
        for name in ("a", "b", "c")
    ]
    assert contents[0] == contents[1]
    assert contents[0].keys() == contents[2].keys()
    changed = {str(path) for path, data in contents[0].items() if data != contents[2][path]}
    assert changed == {"model/model.safetensors", "prompts.jsonl"}


def test_the_checkpoint_is_a_small_float32_qwen3(tmp_path: Path) -> None:
    prepared = example.prepare(tmp_path / "out", num_prompts=1)
    config = AutoConfig.from_pretrained(prepared.hf_checkpoint)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.dtype == torch.float32
    assert config.tie_word_embeddings
    num_parameters = (prepared.hf_checkpoint / "model.safetensors").stat().st_size // 4
    assert 250_000 < num_parameters < 350_000


def test_the_prompts_are_distinct_and_their_labels_are_the_answers(tmp_path: Path) -> None:
    prepared = example.prepare(tmp_path / "out", num_prompts=500)
    records = [json.loads(line) for line in prepared.prompt_data.read_text().splitlines()]
    assert len({record["prompt"] for record in records}) == 500
    assert all(record["prompt"] == f"r{record['label'][::-1]}=" for record in records)
    assert all(len(record["label"]) == 5 and record["label"].isdigit() for record in records)


def test_the_tokenizer_gives_one_token_a_character_and_survives_a_round_trip(tmp_path: Path) -> None:
    prepared = example.prepare(tmp_path / "out", num_prompts=1)
    tokenizer = AutoTokenizer.from_pretrained(prepared.hf_checkpoint)
    ids = tokenizer.encode("r01234=")
    assert ids == [example.TOKEN_IDS[character] for character in "r01234="]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == "r01234=<eos>"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "r01234="


@pytest.mark.parametrize("content", ["r01234", "r01234="])
def test_the_chat_template_ends_the_question_with_one_equals_sign(tmp_path: Path, content: str) -> None:
    prepared = example.prepare(tmp_path / "out", num_prompts=1)
    tokenizer = AutoTokenizer.from_pretrained(prepared.hf_checkpoint)
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "r01234="


def test_the_callers_random_state_and_threads_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    example.prepare(tmp_path / "out", num_prompts=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SettingsError, match="exists and is not an empty folder"):
        example.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_warm_start_that_does_not_arrive_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "MAX_WARM_STEPS", 1)
    monkeypatch.setattr(example, "WARM_TARGET", 0.9)
    with pytest.raises(ModelError, match=r"in 1 steps, wanted: 0\.9 or more"):
        example.prepare(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "--seed is -1, allowed: 0 to 4294967295"),
        (["--mistake-rate", "1"], "--mistake-rate is 1.0, allowed: 0 to below 1"),
        (["--num-prompts", "0"], "--num-prompts is 0, allowed: 1 to 50000"),
        (["--num-prompts", "50001"], "--num-prompts is 50001, allowed: 1 to 50000"),
    ],
)
def test_bad_arguments_are_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert example.main(["--output", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        ("43210", Sample.Status.COMPLETED, 1.0),
        ("43210<eos>", Sample.Status.COMPLETED, 1.0),
        ("43210", Sample.Status.TRUNCATED, 0.0),
        ("4321", Sample.Status.COMPLETED, 0.0),
        ("432100", Sample.Status.COMPLETED, 0.0),
        ("", Sample.Status.COMPLETED, 0.0),
    ],
)
def test_only_the_right_answer_that_ended_its_turn_is_rewarded(
    response: str, status: Sample.Status, reward: float
) -> None:
    sample = Sample(response=response, label="43210", status=status)
    assert asyncio.run(exact_match(None, sample)) == reward


def test_a_missing_label_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(RewardError, match="--label-key label"):
        asyncio.run(exact_match(None, Sample(response="1")))
