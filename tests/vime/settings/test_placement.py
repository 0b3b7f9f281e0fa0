"""Who gets which devices: every placement is sound, and what fits is placed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, Placement, Seat, no_room, place


def nodes(*gpus: int) -> tuple[Node, ...]:
    return tuple(Node(f"node{number}", count) for number, count in enumerate(gpus))


def placed(have: tuple[int, ...], demand: Demand) -> Placement:
    found = place(nodes(*have), demand)
    assert isinstance(found, Placement)
    return found


@pytest.mark.parametrize(
    ("have", "trainers", "engines", "shared", "expected"),
    [
        ((8,), [4], [2, 2], False, None),
        ((8,), [4], [2, 2, 1], False, "Engine 3 of 3 with 1 GPU"),
        ((4, 4), [8], [], False, "Training node 1 of 1 with 8 GPUs"),
        ((8, 8), [8, 8], [8, 8], True, None),
        ((8, 8), [8, 8], [8], False, "Engine 1 of 1 with 8 GPUs"),
        ((8, 8, 8), [8], [16], False, None),
        ((8, 8, 8), [4], [16], False, None),
        ((8, 8), [4], [16], False, "Engine 1 of 1 with 16 GPUs"),
        ((8, 4), [], [12], False, "Engine 1 of 1 with 12 GPUs"),
        ((4, 8, 4, 4), [], [12], False, None),
        ((2, 4), [], [2, 4], False, None),
        ((0, 4), [], [4], False, None),
        ((), [1], [], False, "Training node 1 of 1 with 1 GPU"),
        ((8, 8), [6], [6, 2], False, None),
        ((4, 5), [2, 2], [5], False, None),
        ((5, 6), [3], [5, 3], False, None),
    ],
)
def test_pieces_find_room_or_are_named(
    have: tuple[int, ...], trainers: list[int], engines: list[int], shared: bool, expected: str | None
) -> None:
    found = place(nodes(*have), Demand(tuple(trainers), tuple(engines), shared))
    assert (found.piece if isinstance(found, NoRoom) else None) == expected


def test_engines_that_are_there_already_count_towards_the_limit_of_a_node() -> None:
    demand = Demand(engines=(1,), engines_per_node=2)
    assert isinstance(place(nodes(3), demand, [1]), Placement)
    refused = place(nodes(3), demand, [2])
    assert isinstance(refused, NoRoom)
    assert refused.limit == "--num-gpus-per-node leaves engines 2 GPUs of a node"
    assert isinstance(place(nodes(3), Demand((1,), engines_per_node=2), [2]), Placement), "ranks are not limited"


SIZES = st.integers(1, 6)
DEMANDS = st.builds(
    Demand,
    st.lists(SIZES, max_size=3).map(tuple),
    st.lists(st.integers(1, 10), max_size=4).map(tuple),
    st.booleans(),
    st.none() | st.integers(1, 8),
)


@given(st.lists(st.integers(0, 8), max_size=4).map(tuple), DEMANDS)
def test_every_placement_is_sound(have: tuple[int, ...], demand: Demand) -> None:
    found = place(nodes(*have), demand)
    if isinstance(found, NoRoom):
        return
    assert [len(seats) for seats in found.engines] == list(demand.engines)
    assert len(found.trainers) == sum(demand.trainer_nodes)
    workers = [seat for seats in found.engines for seat in seats]
    assert len(set(workers)) == len(workers)
    assert len(set(found.trainers)) == len(found.trainers)
    if not demand.shared:
        assert not set(workers) & set(found.trainers)
    everyone = {*workers, *found.trainers}
    assert sorted(everyone, key=lambda seat: (seat.share, seat.device)) == [
        Seat(number, device) for number, share in enumerate(found.shares) for device in range(share.num_devices)
    ]
    assert all(share.num_devices <= share.node.gpus for share in found.shares)
    for number in range(len(demand.engines)):
        parts = found.parts(number)
        assert len({len(part) for part in parts}) == 1
        assert [seat for part in parts for seat in part] == list(found.engines[number])
    if demand.engines_per_node is not None and not demand.shared:
        assert all(count <= demand.engines_per_node for count in Counter(seat.share for seat in workers).values())


@given(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), SIZES, st.integers(0, 2), st.integers(1, 5), st.integers(0, 3)
)
@example((5, 7), 4, 1, 3, 2)
def test_equal_pieces_that_fit_one_node_each_are_placed(
    have: tuple[int, ...], trainer: int, num_trainers: int, engine: int, num_engines: int
) -> None:
    pieces = [trainer] * num_trainers + [engine] * num_engines
    fits = any(
        all(
            sum(size for size, at in zip(pieces, where, strict=True) if at == node) <= gpus
            for node, gpus in enumerate(have)
        )
        for where in itertools.product(range(len(have)), repeat=len(pieces))
    )
    found = place(nodes(*have), Demand((trainer,) * num_trainers, (engine,) * num_engines))
    if fits:
        assert isinstance(found, Placement)


def test_ranks_and_workers_of_a_node_have_neighbouring_devices() -> None:
    found = placed((8,), Demand((4,), (2, 2)))
    assert found.trainers == tuple(Seat(0, device) for device in range(4))
    assert found.engines == ((Seat(0, 4), Seat(0, 5)), (Seat(0, 6), Seat(0, 7)))


def test_an_engine_of_two_nodes_has_equal_parts_on_each() -> None:
    found = placed((4, 4, 4), Demand((4,), (8,)))
    assert [[seat.device for seat in part] for part in found.parts(0)] == [[0, 1, 2, 3]] * 2
    assert {seat.share for seat in found.trainers}.isdisjoint(seat.share for seat in found.engines[0])


def test_colocated_engines_take_the_trainers_devices_before_others() -> None:
    found = placed((8, 4), Demand((4,), (2, 2, 4), shared=True))
    assert {seat.share for seat in found.trainers} == {1}
    assert found.engines[:2] == ((Seat(1, 0), Seat(1, 1)), (Seat(1, 2), Seat(1, 3)))
    assert found.engines[2] == tuple(Seat(0, device) for device in range(4))
    assert [share.num_devices for share in found.shares] == [4, 4]


def test_a_refusal_tells_need_and_what_each_node_has_free() -> None:
    have = (Node("a", 3, in_use=5), Node("b", 1))
    demand = Demand((2,), (2, 2), engines_per_node=8)
    missing = place(have, demand)
    assert isinstance(missing, NoRoom)
    error = no_room(demand, have, missing)
    assert error.message == (
        "The run needs 2 (training) and 4 (generation, 2 for each of 2 engines) = 6 GPUs, there "
        "are 3 free of 8 on a, 1 on b. Engine 1 of 2 with 2 GPUs finds no room (without CUDA a GPU is one worker "
        "process)."
    )
    assert error.next_step == "Lower --actor-num-gpus-per-node or --rollout-num-gpus, or add nodes."


def test_a_limit_that_keeps_engines_from_free_gpus_is_named() -> None:
    missing = place(nodes(16), Demand((), (4, 4, 4), engines_per_node=8))
    assert isinstance(missing, NoRoom)
    assert "finds no room; --num-gpus-per-node leaves engines 8 GPUs of a node" in missing.words
    assert "raise --num-gpus-per-node" in missing.next_step
