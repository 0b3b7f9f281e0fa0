"""What a producer says of its groups."""

from pipeline.activity import ActivityBoard, GroupActivity, Phase
from vime.utils.types import Sample


def test_a_group_is_in_the_earliest_phase_of_its_members() -> None:
    now = [0.0]
    board = ActivityBoard(clock=lambda: now[0])
    first, second = Sample(response_length=5), Sample(response_length=7)
    with board.doing(Phase.GENERATING, 3, [first]):
        now[0] = 2.0
        with board.doing(Phase.GENERATING, 3, [second]):
            pass
        with board.doing(Phase.REWARD, 3, [second]):
            now[0] = 5.0
            assert board.groups() == [GroupActivity(Phase.GENERATING, 5.0, 12)]
    with board.doing(Phase.REWARD, 3, [first]):
        now[0] = 6.0
        assert board.groups() == [GroupActivity(Phase.REWARD, 1.0, 12)]
    assert board.groups() == []


def test_seconds_in_a_phase_are_summed_over_samples_also_of_those_that_still_are_in_it() -> None:
    now = [0.0]
    board = ActivityBoard(clock=lambda: now[0])
    with board.doing(Phase.REWARD, 3, [Sample(), Sample()]):
        now[0] = 2.0
    with board.doing(Phase.REWARD, 4, [Sample()]):
        now[0] = 5.0
        assert (board.seconds(Phase.REWARD), board.seconds(Phase.GENERATING)) == (7.0, 0.0)
    assert board.seconds(Phase.REWARD) == 7.0


def test_tokens_of_a_group_that_ended_are_forgotten() -> None:
    board = ActivityBoard(clock=lambda: 0.0)
    with board.doing(Phase.GENERATING, 3, [Sample(response_length=5)]):
        pass
    board.ended(3)
    with board.doing(Phase.REWARD, 3, []):
        assert board.groups() == [GroupActivity(Phase.REWARD, 0.0, 0)]
