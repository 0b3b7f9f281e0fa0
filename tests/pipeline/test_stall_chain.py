"""The sentence that says who waits for whom."""

import dataclasses

from pipeline.activity import GroupActivity, Phase, ProducerActivity
from pipeline.messages import QueueCounts
from pipeline.stages import Stage
from pipeline.stall_chain import RankActivity, RunReport, Silent, chain_words

COUNTS = QueueCounts(generated=8, trained=0, pending=5, in_flight=3, dropped={}, fresh=7, backpressured=False)
WAIT = Stage("", 41, groups_wanted=8)
DEAF = Silent("does not answer within 5 s")


def producer(*groups: GroupActivity, is_admitted: bool = True) -> ProducerActivity:
    return ProducerActivity(list(groups), is_admitted, "judge")


def test_a_wait_for_groups_names_the_reward_and_what_is_generated() -> None:
    groups = [
        GroupActivity(Phase.REWARD, 94.2, 100),
        GroupActivity(Phase.REWARD, 3.0, 100),
        GroupActivity(Phase.GENERATING, 12.0, 12_288),
    ]
    report = RunReport(WAIT, COUNTS, [producer(*groups)])
    assert chain_words(report) == (
        "step 41 waits for 3 groups <- 2 in reward, oldest 94 s: judge; 1 generating, oldest 12 s, 12,288 tokens"
    )


def test_an_engine_that_fails_stands_behind_what_is_generated_and_not_behind_a_reward() -> None:
    engines = {"http://e0": DEAF}
    generating = producer(GroupActivity(Phase.GENERATING, 9, 5))
    report = RunReport(WAIT, COUNTS, [generating], engines=engines)
    assert chain_words(report).endswith(
        "1 generating, oldest 9 s, 5 tokens <- engine http://e0 does not answer within 5 s"
    )
    in_reward = producer(GroupActivity(Phase.REWARD, 9, 5))
    assert "engine" not in chain_words(dataclasses.replace(report, producers=[in_reward]))


def test_an_engine_that_is_not_trained_stands_behind_a_reward_and_not_behind_a_step() -> None:
    report = RunReport(WAIT, COUNTS, [producer(GroupActivity(Phase.REWARD, 9, 5))], frozen={"http://judge": DEAF})
    assert chain_words(report).endswith("oldest 9 s: judge <- engine http://judge does not answer within 5 s")
    assert "engine" not in chain_words(dataclasses.replace(report, stage=Stage("trains", 41)))


def test_a_producer_that_hangs_is_named() -> None:
    assert chain_words(RunReport(WAIT, COUNTS, [DEAF])) == (
        "step 41 waits for 3 groups <- producer 0 does not answer within 5 s"
    )


def test_a_coordinator_that_hangs_is_named_and_nothing_is_counted_as_there() -> None:
    words = chain_words(RunReport(WAIT, DEAF, [producer(GroupActivity(Phase.WRITING, 30, 0))]))
    assert words == (
        "step 41 waits for 8 groups <- the queue coordinator does not answer within 5 s <- 1 being written, oldest 30 s"
    )


def test_held_back_requests_name_the_engines_that_are_fenced() -> None:
    fenced = {"http://e0": Silent("gets no requests: version 3 was not confirmed")}
    words = chain_words(RunReport(WAIT, COUNTS, [producer(is_admitted=False)], engines=fenced))
    assert words == (
        "step 41 waits for 3 groups <- requests are held back until engines have confirmed a version <- "
        "engine http://e0 gets no requests: version 3 was not confirmed"
    )


def test_a_queue_that_hands_out_nothing_and_a_full_disk_are_named() -> None:
    full = dataclasses.replace(RunReport(WAIT, COUNTS, [producer()]))
    idle = QueueCounts(8, 0, 5, 0, {}, 7, True, notices=["The disk is nearly full."])
    words = chain_words(dataclasses.replace(full, counts=idle))
    assert (
        "<- The disk is nearly full. <- the producers have nothing to do: the queue hands out no more groups" in words
    )


def test_leases_without_a_producer_that_works_on_them_are_named() -> None:
    assert chain_words(RunReport(WAIT, COUNTS, [producer()])).endswith(
        "3 groups are leased, and no producer works on any"
    )


def test_training_names_the_rank_that_works_and_the_one_that_hangs() -> None:
    report = RunReport(Stage("trains", 41), COUNTS, ranks=[RankActivity("trains", 94, 3), DEAF, RankActivity("", 1, 3)])
    assert chain_words(report) == (
        "step 41 trains <- trainer rank 0: trains, 94 s; trainer rank 1 does not answer within 5 s; "
        "trainer rank 2 waits"
    )


def test_a_publication_beside_the_training_is_named_where_it_holds_things_up() -> None:
    sending = RankActivity("", 1, 3, "sends weights", 94)
    report = RunReport(Stage("publishes weights", 41), COUNTS, ranks=[sending, RankActivity("", 1, 3)])
    assert chain_words(report) == (
        "step 41 publishes weights <- trainer rank 0: sends weights, 94 s; trainer rank 1 waits"
    )
    both = RankActivity("trains", 7, 3, "sends weights", 94)
    assert chain_words(RunReport(Stage("trains", 42), COUNTS, ranks=[both])) == (
        "step 42 trains <- trainer rank 0: trains, 7 s and sends weights, 94 s"
    )
    assert chain_words(RunReport(WAIT, COUNTS, [producer(is_admitted=False)], [sending])).endswith(
        "requests are held back until engines have confirmed a version <- trainer rank 0: sends weights, 94 s"
    )
