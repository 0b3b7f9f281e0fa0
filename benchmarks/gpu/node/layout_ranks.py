"""One rank of a world that trains under the layouts of `benchmarks.gpu.node.layouts`.

Started as `tests.vime.backends.megatron_utils.layout_worker` is; a scenario is a layout, a chain of layouts, or one
rank in bf16 ("dense", "moe").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file

from benchmarks.gpu.node.layouts import CHAINS, DISTRIBUTED, LAYOUTS, ranks_of
from tests.vime.backends.megatron_utils.layout_worker import LAYOUT_MODELS, Chain, Layout, distances, train
from tests.vime.backends.megatron_utils.megatron_worker import World, main

TIMEOUT_S = 300.0
"""Of ranks for each other: one of them trains alone meanwhile."""
LAYOUT_MODELS["wide"] = {"tied": False, "num_key_value_heads": 4}
LAYOUT_MODELS["wide_experts"] = LAYOUT_MODELS["wide"] | {"num_experts": 8, "norm_topk_prob": True}


@dataclass(frozen=True)
class NodeLayout(Layout):
    """In bf16, with score centering, and routes where there are experts."""

    precision: str = "bf16"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("routes",) if "experts" in self.model else ("top_k",)

    def options(self, world: World, kind: str) -> dict[str, Any]:
        return {**super().options(world, kind), "timeout_s": TIMEOUT_S}


def model_of(layout: str) -> str:
    return "wide_experts" if layout.startswith("moe") else "wide"


def rounded(name: str, world: World) -> dict[str, dict[str, float]]:
    """One rank in bf16 against one in fp32."""
    layout = NodeLayout((), model_of(name))
    (kind,) = layout.kinds
    options = layout.options(world, kind)
    if world.rank != 0:
        world.started += 2
        return {}
    with world.trainer(*layout.optimizer[0], size=1, precision="bf16", **options) as trainer:
        found = train(trainer, kind)
    alone = layout.on_one_rank(world, kind)
    assert alone is not None
    return {kind: distances(found, alone, load_file(options["hf_checkpoint"] / "model.safetensors"))}


def chain_of(name: str, layouts: tuple[str, ...]) -> Chain:
    return Chain(
        model_of(name),
        tuple(LAYOUTS[ranks_of(layout)][layout] for layout in layouts),
        DISTRIBUTED,
        ends_on_one_rank="spread" not in name,
        sizes=tuple(ranks_of(layout) for layout in layouts),
        kind="routes" if name.startswith("moe") else "top_k",
        precision="bf16",
        timeout_s=TIMEOUT_S,
    )


SCENARIOS: dict[str, Callable[[World], Any]] = {
    **{name: functools.partial(rounded, name) for name in ("dense", "moe")},
    **{
        name: functools.partial(NodeLayout.compare, NodeLayout(argv, model_of(name)))
        for layouts in LAYOUTS.values()
        for name, argv in layouts.items()
    },
    **{
        name: functools.partial(Chain.compare, chain_of(name, layouts))
        for chains in CHAINS.values()
        for name, layouts in chains.items()
    },
}

if __name__ == "__main__":
    main(SCENARIOS)
