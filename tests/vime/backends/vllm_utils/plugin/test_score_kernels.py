"""Scores from one pass over the logits against a log-softmax in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from vime.backends.vllm_utils.plugin import gpu_scores
from vime.backends.vllm_utils.plugin.step_columns import pack_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it when it is loaded, so a process that has loaded it otherwise can't change it."""
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETS, reason="runs in a process of its own")


@pytest.mark.timeout(240)
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETS, reason="the tests below run here")
def test_the_kernels_do_in_tritons_interpreter_what_the_tests_below_say() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    ended = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=230
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "passed" in ended.stdout


@pytest.fixture
def kernels() -> Any:
    from vime.backends.vllm_utils.plugin import score_kernels

    return score_kernels


def logits_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    found = 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))
    if kind == "neighbours":  # the most probable tokens share groups
        found = found.sort(dim=-1).values
    if kind == "nucleus":  # top-p has left fewer tokens than a head has, and whole spans without one
        found[:, 7:] = -torch.inf
    if kind == "equal":
        found = torch.zeros_like(found)
    return found.to(torch.bfloat16 if kind == "bf16" else torch.float32).to(DEVICE)


@runs_kernels
@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("random", 0),
        ("bf16", 0),
        ("nucleus", 0),
        ("random", 1),
        ("bf16", 12),
        ("neighbours", 12),
        ("nucleus", 12),
        ("equal", 12),
    ],
)
def test_scores_are_those_of_a_log_softmax(kernels: Any, kind: str, k: int) -> None:
    logits = logits_of(kind, 2, 9001)
    assert kernels.can_score(logits, k)
    token_ids = torch.tensor([0, 6], device=DEVICE)
    ids, log_probs, ranks = kernels.views(kernels.score(logits, k, token_ids), k)
    ids = ids.long()
    expected = logits.double().log_softmax(-1)
    assert torch.equal(ids[:, 0], token_ids)
    assert torch.equal(ranks.long(), (logits >= logits.gather(1, token_ids[:, None])).sum(1))
    torch.testing.assert_close(log_probs.double(), expected.gather(1, ids), atol=2e-6, rtol=0)
    assert torch.equal(logits.gather(1, ids[:, 1:]), logits.topk(k, dim=-1).values)
    assert all(len(set(row)) == k for row in ids[:, 1:].tolist())


@runs_kernels
def test_rows_that_are_not_a_number_stay_so(kernels: Any) -> None:
    """So that the client refuses them, as it does vLLM's."""
    logits = logits_of("random", 2, 9000)
    logits[1, 4] = torch.nan
    _, log_probs, _ = kernels.views(kernels.score(logits, 0, torch.tensor([3, 3], device=DEVICE)), 0)
    assert torch.isnan(log_probs[:, 0]).tolist() == [False, True]


@runs_kernels
@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, -1], ids=["positive", "negative", "all bits"])
@pytest.mark.parametrize("where", [slice(0, None), slice(8999, None)], ids=["all", "the last two"])
def test_no_number_among_the_logits_gives_no_candidate_outside_the_vocabulary(
    kernels: Any, bits: int, where: slice
) -> None:
    vocab_size, k = 9001, 12
    logits = logits_of("random", 2, vocab_size)
    logits.view(torch.int32)[1, where] = bits
    found = kernels.score(logits, k, torch.tensor([3, 3], device=DEVICE))
    all_ids, log_probs, _ = kernels.views(found, k)
    ids = all_ids[1, 1:]
    assert 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
    assert len(set(ids.tolist())) == k
    assert torch.isnan(log_probs[1]).all()
    assert torch.isfinite(log_probs[0]).all()


@runs_kernels
@pytest.mark.parametrize("token", [-1, 9000, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_read_nowhere(kernels: Any, token: int) -> None:
    """Its logit would be another row's, or memory that isn't the program's."""
    logits, k = logits_of("random", 3, 9000), 3
    found = kernels.score(logits, k, torch.tensor([5, token, 5], device=DEVICE))
    ids, log_probs, ranks = kernels.views(found, k)
    assert ids[1, 0] == token
    assert torch.isnan(log_probs[:, 0]).tolist() == [False, True, False]
    assert ranks[1] == 0


@runs_kernels
def test_a_vocabulary_too_small_to_leave_most_of_it_out_is_left_to_vllm(kernels: Any) -> None:
    assert kernels.can_score(torch.empty(1, 151936), 128)
    assert not kernels.can_score(torch.empty(1, 1024), 128)
    assert not kernels.can_score(torch.empty(1, 151936), 129)
    assert not kernels.can_score(torch.empty(9000, 2).T, 0)


@runs_kernels
def test_scores_lie_on_the_host_as_the_engine_core_sends_them() -> None:
    logits, token_ids = logits_of("random", 3, 9000), torch.tensor([0, 5, 6], device=DEVICE)
    lists = gpu_scores._scoring(stock_scores)(logits, 3, token_ids, [0, 1, 2]).to_cpu_nonblocking()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ids, log_probs, ranks, first_rows = lists.tolists()
    assert (ids[:, 0].tolist(), ids.shape, ranks.shape, first_rows) == ([0, 5, 6], (3, 4), (3,), [0, 1, 2])
    rows = pack_rows(ids, log_probs)
    assert np.shares_memory(rows, ids)
    assert np.shares_memory(rows, log_probs)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ((), {}),
        ((None,), {"logits_mode": True}),
        ((None,), {"max_per_req_token_ids": 3}),
        ((torch.zeros(2),), {}),
        ((None,), {"num_logprobs": 100}),
    ],
    ids=["of a prompt", "logits", "of named tokens", "bounds on the device", "most of the vocabulary"],
)
def test_scores_that_the_kernels_do_not_give_are_vllms(others: tuple[Any, ...], named: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    k = named.pop("num_logprobs", 2)
    scoring = gpu_scores._scoring(stock_scores)
    assert scoring(torch.zeros(1, 9000), k, torch.zeros(1, dtype=torch.int64), *others, **named) == "vLLM's"


def test_a_triton_that_refuses_the_kernels_leaves_scores_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = pytest.importorskip("triton")
    calls = []

    def refusing(*_others: Any) -> torch.Tensor:
        calls.append(1)
        raise triton.TritonError("no such thing as a float")

    monkeypatch.setattr("vime.backends.vllm_utils.plugin.score_kernels.score", refusing)
    scoring = gpu_scores._scoring(stock_scores)
    for _ in range(2):
        assert scoring(torch.zeros(1, 9000), 0, torch.zeros(1, dtype=torch.int64), None) == "vLLM's"
    assert len(calls) == 1
    assert "scores are vLLM's, and slower: no such thing as a float" in caplog.text


def stock_scores(*_others: Any, **_named: Any) -> Any:
    """What vLLM's own function gives."""
    return "vLLM's"
