"""Layouts of four and eight ranks in bf16 against one rank in fp32, and checkpoints that go on in the next layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import refuse_one_gpu
from benchmarks.gpu.layouts import in_world
from benchmarks.gpu.part import Part, Stages, run_part

DESCRIPTION = """\
Takes two optimizer steps on the same batches in each layout in bf16, and on one rank in fp32, with tiny models whose
logits differ enough; score centering is on, and a mixture of experts replays routes. Four GPUs make a world of four
ranks, eight one of four and one of eight, none both of them over gloo. LAYOUT is made of tp, pp, cp, ep and dp (tensor,
pipeline, context, expert and data parallel sizes; data parallel ones with the distributed optimizer), moe_ before those
of a mixture of experts.

  LAYOUT_loss         largest difference of a step's loss
  LAYOUT_grad_norm    largest difference of a step's gradient norm, in parts of it
  LAYOUT_log_probs    largest difference of a token's log-probability after the steps
  dense_..., moe_...  the same of one rank in bf16: what the rounding alone makes
  CHAIN_loss, CHAIN_grad_norm
                      one step in each layout of a chain, resumed from the checkpoint that the one before has saved,
                      against as many steps of one rank without a stop. CHAIN is chainRANKS, and for experts that are
                      in whole on each rank moe_chainRANKS, for those that are spread moe_spreadRANKS
  moved               the least that the steps of a layout moved a weight
  outside             losses and gradient norms that differ by more than TOLERANCE; 0 is right
"""
TOLERANCE = 0.03
"""bf16 keeps 8 bits: a number is off by up to 0.004 of itself, and a gradient is made of many."""
RANKS_WORKER = str(Path(__file__).with_name("layout_ranks.py"))

TP2 = ("--tensor-model-parallel-size", "2")
TP4 = ("--tensor-model-parallel-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer",)
WHOLE = ("--expert-tensor-parallel-size", "1")
"""No expert is cut."""


def _spread(size: int) -> tuple[str, ...]:
    return ("--expert-model-parallel-size", str(size), *WHOLE)


LAYOUTS: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    2: {
        "tp2": TP2,
        "pp2": PP2,
        "cp2": CP2,
        "dp2": DISTRIBUTED,
        "moe_tp2": TP2,
        "moe_ep2": _spread(2),
        "moe_dp2": DISTRIBUTED,
    },
    4: {
        "tp4": TP4,
        "tp2_pp2": (*TP2, *PP2),
        "tp2_cp2": (*TP2, *CP2),
        "dp4": DISTRIBUTED,
        "moe_tp4": TP4,
        "moe_tp2_pp2": (*TP2, *PP2),
        "moe_tp2_cp2": (*TP2, *CP2),
        "moe_dp4": DISTRIBUTED,
        "moe_ep4": _spread(4),
        "moe_tp2_ep2": (*TP2, *_spread(2)),
    },
    8: {
        "tp4_pp2": (*TP4, *PP2),
        "tp2_pp2_cp2": (*TP2, *PP2, *CP2),
        "tp2_cp2_dp2": (*TP2, *CP2, *DISTRIBUTED),
        "dp8": DISTRIBUTED,
        "moe_tp4_pp2": (*TP4, *PP2),
        "moe_tp2_pp2_cp2": (*TP2, *PP2, *CP2),
        "moe_ep8": _spread(8),
        "moe_tp2_ep4": (*TP2, *_spread(4)),
        "moe_pp2_ep4": (*PP2, *_spread(4)),
        "moe_tp2_cp2_ep2": (*TP2, *CP2, *_spread(2)),
    },
}
"""By number of ranks; data parallelism takes what the sizes leave."""

CHAINS: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    2: {"chain2": ("tp2", "pp2", "cp2", "dp2"), "moe_chain2": ("moe_tp2", "moe_dp2")},
    4: {
        "chain4": ("tp4", "tp2_pp2", "tp2_cp2", "dp4"),
        "moe_chain4": ("moe_tp4", "moe_tp2_pp2", "moe_tp2_cp2", "moe_dp4"),
        "moe_spread4": ("moe_ep4", "moe_tp2_ep2", "moe_ep4"),
    },
    8: {
        "chain8": ("tp4_pp2", "tp2_pp2_cp2", "tp4", "tp2_cp2_dp2", "dp8"),
        "moe_chain8": ("moe_tp4_pp2", "moe_tp2_cp2", "moe_tp2_pp2_cp2"),
        "moe_spread8": ("moe_ep8", "moe_tp2_ep4", "moe_ep4", "moe_pp2_ep4", "moe_tp2_cp2_ep2"),
    },
}
"""By number of ranks: layouts that resume each other, smaller ones too. All but those of spread experts end on one
rank, which is no place for the checkpoint of a spread model."""


def ranks_of(layout: str) -> int:
    """Ranks that a layout needs."""
    return next(ranks for ranks, layouts in LAYOUTS.items() if layout in layouts)


def worlds_of(gpus: int) -> tuple[int, ...]:
    """Numbers of ranks to try; raises `SettingsError` for a single GPU."""
    refuse_one_gpu(gpus)
    return (2,) if 2 <= gpus < 4 else tuple(ranks for ranks in (4, 8) if not gpus or ranks <= gpus)


def layouts_of(stages: Stages, world: int) -> dict[str, float]:
    """Distances of every layout of one world, and of one rank in bf16."""
    names = ["dense", "moe", *LAYOUTS[world]]
    found = {name: _only(each) for name, each in in_world(stages, f"ranks{world}", world, names, RANKS_WORKER).items()}
    values = {
        f"{name}_{value}": each[value] for name, each in found.items() for value in ("loss", "grad_norm", "log_probs")
    }
    return values | {f"moved{world}": min(each["moved"] for each in found.values())}


def _only(kinds: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    (found,) = kinds.values()
    return found


def chains_of(stages: Stages, world: int) -> dict[str, float]:
    """Distances of every chain of one world."""
    found = in_world(stages, f"chains{world}", world, list(CHAINS[world]), RANKS_WORKER)
    return {f"{name}_{value}": each[value] for name, each in found.items() for value in ("loss", "grad_norm")}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    found: dict[str, float] = {}
    worlds = worlds_of(stages.gpus)
    for world in worlds:
        found |= stages.once(f"ranks{world}", partial(layouts_of, stages, world), needs_s=240)
        found |= stages.once(f"chains{world}", partial(chains_of, stages, world), needs_s=200)
    compared = [value for name, value in found.items() if name.endswith(("_loss", "_grad_norm"))]
    moved = min(found.pop(f"moved{world}") for world in worlds)
    return found | {"moved": moved, "outside": sum(not value <= TOLERANCE for value in compared)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("TOLERANCE", str(TOLERANCE))
    return run_part(Part("node.layouts", words, measure, ("torch", "megatron-core")), argv)


if __name__ == "__main__":
    raise SystemExit(main())
