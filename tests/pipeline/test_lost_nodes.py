"""Who has lost a node, what that needs elsewhere, and what is said when nobody has it."""

from __future__ import annotations

from pipeline.lost_nodes import lost_processes, no_room_left, place_lost
from pipeline.node_devices import ProcessPlace
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, Placement

RUN = Demand(trainer_nodes=(2, 2), engines=(1, 4))
A, B, C = (ProcessPlace(node, f"10.0.0.{node}") for node in "abc")
TRAINERS = [A, A, B, B]
ENGINES = [[B], [B, C]]


def test_training_nodes_and_parts_of_engines_that_lay_on_a_lost_node_need_a_place() -> None:
    lost = lost_processes(RUN, TRAINERS, ENGINES, {"a", "c"})
    assert (lost.ranks, lost.parts, lost.nodes) == ((2, 3), ((0, 0), (1, 0)), ("b",))
    assert lost.demand == Demand(trainer_nodes=(2,), engines=(1, 2)), "the part on the other node stays"
    assert lost.words == "trainer ranks 2, 3 and engines 0, 1"


def test_ranks_of_several_training_nodes_on_one_lost_node_may_part() -> None:
    lost = lost_processes(Demand(trainer_nodes=(1, 1)), [A, A], [], {"b"})
    assert lost.demand.trainer_nodes == (1, 1)
    assert isinstance(place_lost([Node("b", 1), Node("c", 1)], lost, [0, 0]), Placement)


def test_only_those_that_are_asked_for_move() -> None:
    assert lost_processes(RUN, TRAINERS, ENGINES, {"a", "c"}, of_engines=[]).words == "trainer ranks 2, 3"
    assert lost_processes(RUN, TRAINERS, ENGINES, {"a", "c"}, of_trainers=False, of_engines=[1]).words == "engine 1"


def test_nothing_is_lost_while_all_nodes_live() -> None:
    assert not lost_processes(RUN, TRAINERS, ENGINES, {"a", "b", "c"})


def test_a_part_of_an_engine_is_not_split_further() -> None:
    lost = lost_processes(RUN, TRAINERS, ENGINES, {"a", "b"})
    assert place_lost([Node("d", 1), Node("e", 1)], lost, [0, 0]) == NoRoom("A part of engine 1 with 2 GPUs")


def test_the_refusal_names_the_node_what_it_held_what_that_needs_and_what_is_free() -> None:
    lost = lost_processes(RUN, TRAINERS, ENGINES, {"a", "c"}, of_engines=[])
    offers = [Node("first", 1, in_use=2)]
    missing = place_lost(offers, lost, [0])
    assert isinstance(missing, NoRoom)
    refused = no_room_left(lost, {"b": "second"}, offers, missing, 60.0)
    assert str(refused) == (
        "1 node (second) left the Ray cluster with trainer ranks 2, 3. Needed elsewhere: 2 (training) "
        "and 0 (generation) = 2 GPUs; after 60 s there are 1 free of 3 on first. Training node 1 of 1 with 2 "
        "GPUs finds no room (without CUDA a GPU is one worker process). Add a node, or ask for less with "
        "--actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus; the same command resumes from the newest "
        "commit."
    )
