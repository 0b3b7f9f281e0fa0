"""`--vllm-*` flags."""

from __future__ import annotations

import pytest

from vime.backends.vllm_utils.arguments import check_engine_args, split_vllm_flags
from vime.errors import SettingsError


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
def test_the_engines_parser_checks_names_and_values() -> None:
    check_engine_args(["--max-num-seqs", "8", "--no-enable-prefix-caching", "--max_num_batched_tokens=512"])
    with pytest.raises(SettingsError, match=r"--vllm-max-num-seq is not an option.*Did you mean --vllm-max-num-seqs\?"):
        check_engine_args(["--max-num-seq", "8"])
    with pytest.raises(SettingsError, match=r"vLLM refuses --max-num-seqs many.*invalid"):
        check_engine_args(["--max-num-seqs", "many"])
    with pytest.raises(SettingsError, match=r"--vllm-port can't be set"):
        check_engine_args(["--port", "1"])
