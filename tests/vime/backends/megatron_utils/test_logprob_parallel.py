"""A vocabulary shared by two ranks gives what one rank gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vime.backends.megatron_utils.dense_head import make_case
from tests.vime.backends.megatron_utils.test_logprob import NAMES, RULES, loss_of, run
from vime.backends.megatron_utils.head.types import HeadOptions

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[3]
KINDS = ("plain", "top_k", "nucleus")

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "head_worker.py"), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank), "2", *KINDS], env=environment) for rank in range(2)]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_terms_and_gradients_of_two_ranks_equal_those_of_one(folder: Path, kind: str) -> None:
    shards: list[dict[str, Any]] = [torch.load(folder / f"{kind}_{rank}.pt") for rank in range(2)]
    case = make_case(kind)
    leaves = case.fresh()
    alone = run(case, HeadOptions(41, 0.8), None if kind == "plain" else RULES["tis"][0], leaves)
    loss_of(alone).backward()
    for shard in shards:
        for name in NAMES:
            expected = getattr(alone, name)
            if expected is None:
                assert name not in shard
            else:
                torch.testing.assert_close(shard[name], expected.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(shard["hidden"], leaves[0].grad, rtol=1e-5, atol=2e-6)
    weight = torch.cat([shard["weight"] for shard in shards])
    torch.testing.assert_close(weight[:41], leaves[1].grad, rtol=1e-5, atol=2e-6)
    assert weight[41:].abs().max() == 0
