"""The router's command line."""

from __future__ import annotations

from pathlib import Path

from vime.backends.vllm_utils.router_arguments import router_options_of
from vime.backends.vllm_utils.router_server import RouterLaunch, metrics_address, router_command


def words(*given: str) -> list[str]:
    return router_command(RouterLaunch("h", 8, Path("log"), router_options_of(given)), 9)[2:]


def test_sessions_are_hashed_and_nothing_is_sent_again_behind_vimes_back() -> None:
    command = " ".join(words())
    assert command.startswith("vllm_router.launch_router --host h --port 8 ")
    assert "--policy consistent_hash" in command
    assert "--disable-retries" in command
    assert "--prometheus-port 9" in command


def test_what_the_user_gives_takes_the_place_of_a_default() -> None:
    command = words("--router-policy", "cache_aware", "--router-balance-abs-threshold", "0", "--router-log-level=debug")
    assert command.count("--policy") == 1
    assert command[-5:] == ["--policy", "cache_aware", "--balance-abs-threshold", "0", "--log-level=debug"]
    assert "error" not in command


def test_its_metrics_are_where_the_command_says_that_they_are() -> None:
    assert metrics_address(words()) == ("127.0.0.1", 9)
    given = words("--router-prometheus-host", "10.0.0.1", "--router-prometheus-port=7")
    assert metrics_address(given) == ("10.0.0.1", 7)
