"""GPU arithmetic: what the run needs against what the nodes have."""

from __future__ import annotations

import pytest

from vime.settings.machine import Machine, Node
from vime.settings.parse import parse_settings
from vime.settings.rules.cluster import gpus_exist


def nodes(*gpus: int) -> tuple[Node, ...]:
    return tuple(Node(f"node{number}", count) for number, count in enumerate(gpus))


@pytest.mark.parametrize(
    ("words", "have", "said"),
    [
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", (8,), None),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", None, None),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 4",
            (8, 4),
            "The run needs 16 (training, 8 on each of 2 nodes) and 4 (generation, 1 for each of 4 engines) = 20 GPUs, "
            "allowed: what fits 8 on node0, 4 on node1 = 12. Training node 2 of 2 with 8 GPUs finds no room",
        ),
        ("--actor-num-gpus-per-node 8 --rollout-num-gpus 1", (8,), "8 (training) and 1 (generation) = 9"),
        ("--actor-num-gpus-per-node 8 --colocate", (8,), None),
        ("--actor-num-gpus-per-node 4 --colocate --rollout-num-gpus 12", (8,), "= 12 GPUs"),
        ("--debug-rollout-only --actor-num-gpus-per-node 64", (1,), None),
        ("--debug-train-only --actor-num-gpus-per-node 1 --rollout-num-gpus 64", (1,), None),
        ("--rollout-external-engine-addrs a:1 --actor-num-gpus-per-node 1 --rollout-num-gpus 64", (1,), None),
    ],
)
def test_need_and_have_are_told_by_node(words: str, have: tuple[int, ...] | None, said: str | None) -> None:
    machine = Machine(None if have is None else nodes(*have))
    problems = list(gpus_exist(parse_settings(words.split()), machine))
    if said is None:
        assert problems == []
    else:
        (problem,) = problems
        assert said in str(problem)
        assert problem.next_step == "Lower --actor-num-gpus-per-node or --rollout-num-gpus, or add nodes."
