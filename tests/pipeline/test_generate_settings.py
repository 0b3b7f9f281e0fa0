"""What of the settings reaches the requests for samples that are trained."""

from pipeline.generate_settings import rollout_sampling
from vime.settings.parse import parse_settings

ARGV = [
    "--rollout-max-response-len", "30", "--rollout-max-context-len", "50", "--rollout-temperature", "0.7",
    "--rollout-top-p", "0.9", "--rollout-top-k", "20", "--rollout-stop", "end", "stop here",
    "--rollout-stop-token-ids", "7", "8", "--rollout-skip-special-tokens",
    "--vllm-enable-deterministic-inference", "--rollout-seed", "3",
]  # fmt: skip


def test_every_sampling_flag_reaches_the_requests() -> None:
    found = rollout_sampling(parse_settings(ARGV))
    assert (found.max_response_tokens, found.max_context_tokens, found.min_response_tokens) == (30, 50, 0)
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.9, 20)
    assert (found.stop, found.stop_token_ids, found.skip_special_tokens) == (("end", "stop here"), (7, 8), True)
    assert found.seed == 3


def test_requests_are_not_seeded_unless_that_is_asked_for() -> None:
    assert rollout_sampling(parse_settings(["--rollout-seed", "3"])).seed is None
