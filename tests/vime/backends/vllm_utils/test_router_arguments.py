"""`--router-*` flags, against the installed vllm-router's parser."""

import pytest

from vime.backends.vllm_utils.router_arguments import check_router_args, router_options
from vime.errors import SettingsError


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--router-balance-abs-threshold", "0"],
        ["--router-policy", "consistent_hash"],
        ["--router-policy=consistent_hash", "--router-disable-retries"],
        ["--router-cors-allowed-origins", "a", "b"],
    ],
)
def test_flags_of_the_router_are_accepted(words: list[str]) -> None:
    check_router_args(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--router-balance-abs-treshold", "0"], "the nearest one is --router-balance-abs-threshold"),
        (["--router-policy", "mystery"], "vllm-router refuses --router-policy mystery: .*invalid choice"),
        (["--router-balance-abs-threshold", "many"], "invalid int value"),
        (["--router-port", "30000"], "--router-port can't be set: vime sets the router's --port itself"),
        (["--router-prefill", "http://a"], "--router-prefill can't be set"),
    ],
)
def test_what_it_does_not_take_is_refused_with_a_next_step(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        check_router_args(words)
    assert caught.value.next_step


def test_options_have_the_prefix_and_leave_out_what_vime_sets() -> None:
    names = [name for name, _ in router_options()]
    assert "--router-policy" in names
    assert "--router-prefill" not in names
