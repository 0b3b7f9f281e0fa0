"""Where values come from, and which of them wins."""

import logging
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings.groups import all_flags
from vime.settings.resolve import Source, resolve, resolve_all


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_every_flag_has_a_source(tmp_path: Path) -> None:
    config = written(tmp_path, "run.toml", "[trainer]\nlr = 1e-4\nseed = 7\n")
    resolved = resolve(["--config", config, "--seed", "8"])
    assert resolved.settings.trainer.lr == 1e-4
    assert resolved.settings.trainer.seed == 8
    assert resolved.sources["--lr"] == Source("file", config)
    assert resolved.sources["--seed"] == Source("flag")
    assert resolved.sources["--clip-grad"] == Source("default")
    assert str(resolved.sources["--lr"]) == f"file:{config}"
    assert resolved.is_given("lr")
    assert not resolved.is_given("clip_grad")


def test_a_flag_given_with_its_default_counts_as_given() -> None:
    assert resolve(["--clip-grad", "1.0"]).is_given("clip_grad")


def test_a_derived_value_names_its_reason() -> None:
    resolved = resolve(["--colocate"]).derive("--colocate", offload_train=True, eps_clip=0.3)
    assert resolved.settings.cluster.offload_train is True
    assert resolved.settings.objective.eps_clip == 0.3
    assert str(resolved.sources["--offload-train"]) == "derived:--colocate"


def test_yaml_holds_what_toml_holds(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "run.yaml",
        "trainer:\n  lr: 1e-6\n  train_env_vars: {A: '1'}\n"
        "objective: {rewards_normalization: false}\n"
        "evaluation: {eval_prompt_data: [aime, aime.jsonl]}\n"
        "cluster: {offload-train: false}\n"
        "vllm_args: {max_model_len: 64, enforce-eager: true}\n"
        "router_args: {policy: consistent_hash}\n"
        "megatron_args: {tensor_model_parallel_size: 2}\n",
    )
    settings = resolve(["--config", config, "--vllm-max-model-len", "128"]).settings
    assert settings.trainer.lr == 1e-6
    assert settings.trainer.train_env_vars == {"A": "1"}
    assert settings.objective.rewards_normalization is False
    assert settings.evaluation.eval_prompt_data == ("aime", "aime.jsonl")
    assert settings.cluster.offload_train is False
    assert settings.vllm_args == ("--vllm-enforce-eager", "--vllm-max-model-len", "128")
    assert settings.router_args == ("--router-policy", "consistent_hash")
    assert settings.megatron_args == ("--tensor-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[trianer]\nlr = 1.0", r"a\.toml: trianer is not a setting; the nearest one is trainer"),
        ("a.toml", "[trainer]\nlrr = 1.0", r"a\.toml: trainer\.lrr is not a setting; the nearest one is lr"),
        ("a.toml", "[trainer]\neps_clip = 1.0", r"trainer\.eps_clip is not a setting \(eps_clip belongs into obj"),
        ("a.toml", "lr = 1.0", r"lr is not a setting \(lr belongs into trainer\)"),
        ("a.toml", "[trainer]\nseed = 'x'", r"trainer\.seed is 'x' \(str\), allowed: an integer"),
        ("a.toml", "[trainer]\nseed = true", r"trainer\.seed is True \(bool\), allowed: an integer"),
        ("a.toml", "[trainer]\nlr = 'fast'", r"trainer\.lr is 'fast' \(str\), allowed: a number"),
        ("a.toml", "[trainer]\nlr = nan", r"trainer\.lr is nan, allowed: a finite number"),
        ("a.toml", "[cluster]\ncolocate = 1", r"cluster\.colocate is 1 \(int\), allowed: true or false"),
        ("a.toml", "[objective]\neps_clip = -1", r"objective\.eps_clip is -1\.0, allowed: 0 or more"),
        ("a.toml", "[objective]\nkl_loss_type = 'k4'", r"kl_loss_type is k4, allowed: k1, k2, k3, low_var_kl"),
        ("a.toml", "[rollout]\nrollout_stop = ['a', 1]", r"rollout_stop is .*, allowed: a list of texts"),
        ("a.toml", "[data]\nmultimodal_keys = 'x'", r"multimodal_keys is 'x' \(str\), allowed: a table"),
        ("a.toml", "[command]\nconfig = 'b.toml'", r"command\.config can't be set in a file"),
        ("a.toml", "[vllm_args]\nenforce_eager = false", r"enforce_eager is False, allowed: true, a number"),
        ("a.toml", "trainer = 3", r"trainer is 3, allowed: a table of keys"),
        ("a.toml", "[trainer", r"--config .*a\.toml: "),
        ("a.yaml", "trainer: {lr: 1.0, lr: 2.0}", r"line 1: the key 'lr' is there twice"),
        ("a.yaml", "cluster: {offload-train: true, offload_train: false}", r"offload_train is there twice"),
        ("a.yaml", "- 1", r"allowed at the top level: keys with values"),
        ("a.yaml", "a: !!python/object:os.system {}", r"--config .*a\.yaml: "),
    ],
)  # fmt: skip
def test_a_bad_config_file_names_file_key_found_and_allowed(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        resolve(["--config", written(tmp_path, name, text)])
    assert caught.value.next_step


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*nowhere\.toml: .*No such file"):
        resolve(["--config", str(tmp_path / "nowhere.toml")])


def test_the_custom_config_wins_over_the_command_line_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    custom = written(tmp_path, "c.yaml", "lr: 2e-6\nvllm_max_model_len: 64\nlr_decay_style: cosine\nwandb_key: hush\n")
    with caplog.at_level(logging.INFO):
        resolved = resolve(["--lr", "1e-3", "--custom-config-path", custom])
    assert resolved.settings.trainer.lr == 2e-6
    assert resolved.settings.vllm_args == ("--vllm-max-model-len", "64")
    assert resolved.settings.megatron_args == ("--lr-decay-style", "cosine")
    assert resolved.sources["--lr"] == Source("file", custom)
    assert f"{custom} sets lr to 2e-06, over 0.001" in caplog.text
    assert "hush" not in caplog.text


def test_an_unknown_key_of_the_custom_config_names_the_nearest(tmp_path: Path) -> None:
    custom = written(tmp_path, "c.yaml", "eps_clpi: 0.1\n")
    with pytest.raises(SettingsError, match=r"c\.yaml: eps_clpi is not a setting; the nearest one is eps_clip"):
        resolve(["--custom-config-path", custom])


def test_a_config_file_may_name_the_custom_config_but_that_names_no_other(tmp_path: Path) -> None:
    custom = written(tmp_path, "c.yaml", "lr: 3.0\n")
    config = written(tmp_path, "run.toml", f"[command]\ncustom_config_path = '{custom}'\n")
    assert resolve(["--config", config]).settings.trainer.lr == 3.0
    again = written(tmp_path, "d.yaml", f"custom_config_path: {custom}\n")
    with pytest.raises(SettingsError, match="can't name another file"):
        resolve(["--custom-config-path", again])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--apply-chat-template-kwargs", "[1]"], "is not a JSON object"),
        (["--custom-rm-path", "reward.py:f"], "--custom-rm-path is reward.py:f, allowed: an import path"),
        (["--rollout-external-engine-addrs", "a:1", "b"], "--rollout-external-engine-addrs is b, allowed: host:port"),
        (["--lr", "inf"], "--lr is inf, allowed: a finite number"),
        (["--rollout-top-p", "1.5"], "allowed: more than 0, 1 or less"),
        (["--rollout-top-k", "0"], "allowed: -1, or 1 or more"),
        (["--vllm-router-port", "70000"], "allowed: 1 to 65535"),
    ],
)
def test_a_value_out_of_range_names_the_flag_and_what_is_allowed(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(words)


def test_supervised_fine_tuning_starts_no_engine_unless_the_user_wants_one() -> None:
    resolved = resolve(["--loss-type", "sft_loss"])
    assert resolved.settings.cluster.num_engines == 0
    assert str(resolved.sources["--rollout-num-gpus"]) == "derived:--loss-type sft_loss"
    assert resolve(["--loss-type", "sft_loss", "--rollout-num-gpus", "1"]).settings.cluster.num_engines == 1
    assert resolve([]).settings.cluster.num_engines == 1


def test_no_flag_takes_empty_text() -> None:
    texts = [described for _, described in all_flags().values() if described.type is str and not described.choices]
    assert len(texts) > 50
    for described in texts:
        with pytest.raises(SettingsError, match=f"{described.name} is empty, allowed: text"):
            resolve([described.name, ""])


def test_all_that_is_wrong_with_single_flags_and_keys_is_told_at_once(tmp_path: Path) -> None:
    config = written(tmp_path, "run.toml", "[data]\nnum_rolout = 3\n[trainer]\nlr = 'fast'\n[nothing]\n")
    custom = written(tmp_path, "more.yaml", "eps_clp: 0.1\neps_clip: -1\n")
    words = "--num-rolout 5 --rollout-batch-sze 3 --clip-grad x --num-epoch y --n-samples-per-prompt 0 --save= stray"
    given = ["first", *words.split(), "--use-tis", "--seed", "7", "--config", config, "--custom-config-path", custom]
    with pytest.raises(SettingsError) as caught:
        resolve(given)
    lines = caught.value.message.splitlines()
    assert lines[0] == "13 settings can't work:"
    for number, told in enumerate(
        (
            "Stray word 'first'.", "Argument --clip-grad: invalid float value: 'x'",
            "Argument --num-epoch: invalid int value: 'y'",
            "Stray word 'stray' after --save=, which takes no more.",
            "--n-samples-per-prompt is 0, allowed: 1 or more", "--save is empty",
            f"{config}: data.num_rolout is not a setting", f"{config}: trainer.lr is 'fast'",
            f"{config}: nothing is not a setting", "--num-rolout is not a flag",
            "--rollout-batch-sze is not a flag",
        ),
        start=1,
    ):  # fmt: skip
        assert any(line.startswith(f"{number}. {told}") for line in lines), (told, lines)
    assert any("more.yaml: eps_clp is not a setting" in line for line in lines)
    assert any("more.yaml: eps_clip is -1.0" in line for line in lines)
    right, errors = resolve_all(given)
    assert len(errors) == 13
    assert (right.settings.trainer.seed, right.settings.objective.use_tis) == (7, True)
    assert right.settings.trainer.clip_grad == 1.0, "a wrong one has its default"


def test_repeated_and_later_flags_count_as_always_where_another_one_is_wrong() -> None:
    hooks = ["--rollout-sample-hook-path", "a.b", "--seed", "1", "--rollout-sample-hook-path", "c.d", "--seed", "2"]
    right, errors = resolve_all([*hooks, "--lr", "fast", "--vllm-max-model-len", "64"])
    assert len(errors) == 1
    assert right.settings.rollout.rollout_sample_hook_path == ("a.b", "c.d")
    assert right.settings.trainer.seed == 2
    assert right.settings.vllm_args == ("--vllm-max-model-len", "64")


def test_a_word_too_many_never_goes_to_a_flag_of_others() -> None:
    with pytest.raises(SettingsError, match="Stray word 'oops' after --lr, which takes no more"):
        resolve(["--vllm-max-model-len", "64", "--lr", "1e-5", "oops"])


def test_text_that_begins_with_dashes_and_has_blanks_is_a_value() -> None:
    settings = resolve(["--rollout-stop", "-- end of answer", "--- x", "--wandb-group", "-- a=b"]).settings
    assert settings.rollout.rollout_stop == ("-- end of answer", "--- x")
    assert settings.logging.wandb_group == "-- a=b"
    with pytest.raises(SettingsError, match="Stray word '-- x' after --seed"):
        resolve(["--seed", "3", "-- x"])
