"""How often a process may be started again."""

from pipeline.restarts import PERIOD_S, RestartBudget


def test_restarts_are_counted_and_end() -> None:
    budget = RestartBudget(2, clock=lambda: 0.0)
    assert [budget.take() for _ in range(3)] == ["restart 1 of 2", "restart 2 of 2", None]


def test_restarts_of_long_ago_are_forgotten() -> None:
    now = [0.0]
    budget = RestartBudget(1, clock=lambda: now[0])
    assert budget.take() == "restart 1 of 1"
    now[0] = PERIOD_S + 1
    assert budget.take() == "restart 1 of 1"
