"""One rank of the head's vocabulary: `python head_worker.py FOLDER RANK WORLD_SIZE KIND...` writes its results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.vime.backends.megatron_utils.dense_head import make_case
from tests.vime.backends.megatron_utils.test_logprob import NAMES, RULES, loss_of
from vime.backends.megatron_utils.head.types import HeadOptions
from vime.backends.megatron_utils.logprob import response_log_probs

VOCABULARY = 41
"""Odd, so that the last rank has a row of padding."""


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for kind in sys.argv[4:]:
        case = make_case(kind, vocab=VOCABULARY)
        hidden, weight = case.fresh()
        rows = -(-VOCABULARY // size)
        padded = torch.cat([weight.detach(), torch.full((rows * size - VOCABULARY, weight.size(1)), 9.0)])
        shard = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        terms = response_log_probs(
            hidden,
            shard,
            case.targets,
            HeadOptions(VOCABULARY, 0.8, chunk_rows=5, tile_columns=8),
            dist.group.WORLD,
            candidates=case.candidates,
            nucleus=case.nucleus,
            rule=None if kind == "plain" else RULES["tis"][0],
        )
        loss_of(terms).backward()
        assert hidden.grad is not None
        dist.all_reduce(hidden.grad)
        found = {name: getattr(terms, name) for name in NAMES}
        result = {name: value.detach() for name, value in found.items() if value is not None}
        torch.save({**result, "hidden": hidden.grad, "weight": shard.grad}, folder / f"{kind}_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
