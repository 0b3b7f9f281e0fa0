"""`--vllm-*` flags."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path

import pytest

from vime.backends.vllm_utils import arguments
from vime.backends.vllm_utils.arguments import known_options, split_vllm_flags, unknown_options
from vime.backends.vllm_utils.launch import user_options
from vime.errors import SettingsError
from vime.settings.owned_options import OWNED_VLLM_OPTIONS


def test_flags_with_the_prefix_go_to_the_engine_and_the_rest_stays() -> None:
    argv = ["--lr", "1e-6", "--vllm-max-num-seqs", "8", "--seed", "1", "--vllm-enforce-eager", "--vllm-block-size=32"]
    engine, rest = split_vllm_flags(argv)
    assert engine == ["--max-num-seqs", "8", "--enforce-eager", "--block-size=32"]
    assert rest == ["--lr", "1e-6", "--seed", "1"]


def test_reserved_flags_stay_with_vime() -> None:
    argv = ["--vllm-router-ip", "10.0.0.1", "--vllm-swap-space", "1"]
    engine, rest = split_vllm_flags(argv, frozenset({"--vllm-router-ip"}))
    assert engine == ["--swap-space", "1"]
    assert rest == ["--vllm-router-ip", "10.0.0.1"]


def test_negative_values_belong_to_their_flag() -> None:
    assert split_vllm_flags(["--vllm-max-logprobs", "-1"]) == (["--max-logprobs", "-1"], [])


@pytest.mark.slow
def test_unknown_names_are_told_with_the_nearest() -> None:
    assert unknown_options(["--max-num-seq", "8", "--dtype=float32"]) == {"--vllm-max-num-seq": "--vllm-max-num-seqs"}


def test_known_names_are_told_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "known_options", lambda: pytest.fail("vLLM was asked"))
    words = ["--max-num-seqs", "8", "--no-enable-prefix-caching", "--max_num_batched_tokens=512",
             "--compilation-config.mode", "0"]  # fmt: skip
    assert unknown_options(words) == {}


def test_names_of_another_vllm_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "known_options", lambda: frozenset({"--brand-new"}))
    assert unknown_options(["--brand_new=1"]) == {}


@pytest.mark.parametrize("option", sorted(OWNED_VLLM_OPTIONS))
@pytest.mark.parametrize("form", ["--{}", "--no-{}", "--{}=1", "--{}.part=1"])
def test_what_vime_sets_itself_is_refused_by_name_in_every_form(option: str, form: str) -> None:
    for name in (option, option.replace("-", "_")):
        with pytest.raises(SettingsError, match=f"--vllm-{option} can't be set") as caught:
            user_options([form.format(name)])
        assert OWNED_VLLM_OPTIONS[option] in caught.value.next_step


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_vllm() -> None:
    """Refreshed by `python scripts/list_vllm_flags.py`."""
    listed = json.loads(Path(arguments.__file__).with_name(arguments.VLLM_FLAGS_FILE).read_text())
    assert listed["version"] == metadata.version("vllm").partition("+")[0]
    assert frozenset(listed["options"]) == known_options()


@pytest.mark.slow
def test_nearly_all_engine_args_of_vllm_can_be_passed_on() -> None:
    """Every field of EngineArgs has a flag; some are spelt otherwise (`model` may be positional)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(AsyncEngineArgs)}
    missing = fields - known_options()
    assert len(missing) < 0.1 * len(fields), sorted(missing)
