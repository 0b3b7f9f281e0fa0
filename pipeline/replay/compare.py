"""Results of a replay against those that the run logged: equal, or where they differ first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pipeline.step_results import RolloutResult, StepResult


class Difference(msgspec.Struct, frozen=True):
    """One value that isn't what the run logged."""

    rollout_id: int
    step: int
    """Optimizer step of the rollout, from 0; parameters are compared after the last one."""
    quantity: str
    """"loss of sample", "parameter", or the name of a metric."""
    name: str
    """Index of the sample, or name of the parameter."""
    logged: float | str | None
    found: float | str | None
    """None where one side doesn't have the value."""

    def __str__(self) -> str:
        named = f" {self.name}" if self.name else ""
        return (
            f"rollout {self.rollout_id}, step {self.step}, {self.quantity}{named}: "
            f"the run has {_shown(self.logged)}, the replay {_shown(self.found)}"
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A whole replay against the log."""

    exact: bool
    """Bit by bit; otherwise within `tolerance`, since layouts differ."""
    tolerance: float
    layout_differences: list[str]
    num_values: int
    """Values that were compared."""
    differences: list[Difference]
    """In the order in which they arise: a step's samples, its metrics, then the parameters."""

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        how = "bitwise equal" if self.exact else f"equal within {self.tolerance:g}"
        if not self.num_values:
            return "Nothing was logged that could be compared."
        if not self.differences:
            return f"{how} ({self.num_values} values compared)"
        return (
            f"not {how}: differs first at {self.differences[0]} ({len(self.differences)} of {self.num_values} differ)"
        )


Value = float | str
Key = tuple[int, int, str, str]
"""Rollout, step, quantity, name."""


def compare(logged: Sequence[RolloutResult], found: Sequence[RolloutResult], tolerance: float) -> Comparison:
    """Compare by rollout; results of all ranks of a rollout belong together.

    With the same layout all must agree bit by bit. Otherwise a number may differ by `tolerance` of its
    size, or of 0.01 where it is smaller, and parameters, which ranks may hold other parts of, are left out.
    """
    differing = layout_differences(logged, found)
    exact = not differing
    there, here = _values(logged, parameters=exact), _values(found, parameters=exact)
    # A rollout that the run didn't live to log can't be compared.
    rollouts = {result.rollout_id for result in logged}
    keys = dict.fromkeys(key for key in [*there, *here] if key[0] in rollouts)
    differences = [
        Difference(*key, logged=there.get(key), found=here.get(key))
        for key in sorted(keys, key=_moment)
        if not _agree(there.get(key), here.get(key), None if exact else tolerance)
    ]
    return Comparison(
        exact=exact,
        tolerance=tolerance,
        layout_differences=differing,
        num_values=len(keys),
        differences=differences,
    )


def layout_differences(logged: Sequence[RolloutResult], found: Sequence[RolloutResult]) -> list[str]:
    """What of the layout isn't the run's: "ranks: 2 in the run, 1 here"."""
    if not logged or not found:
        return []
    there, here = logged[0].layout, found[0].layout
    return [
        f"{name}: {_of(there, name)} in the run, {_of(here, name)} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]


def _values(results: Sequence[RolloutResult], *, parameters: bool) -> dict[Key, Value]:
    values: dict[Key, Value] = {}
    for result in results:
        for kind, steps in (("critic ", result.critic_steps), ("", result.steps)):
            for number, step in enumerate(steps):
                values |= {
                    (result.rollout_id, number, kind + quantity, name): v for quantity, name, v in _of_step(step)
                }
        if parameters:
            last = max(len(result.steps), len(result.critic_steps)) - 1
            for name, digest in result.parameters.items():
                values[result.rollout_id, last, "parameter", f"{name} (rank {result.rank})"] = digest
    return values


def _of_step(step: StepResult) -> Iterator[tuple[str, str, float]]:
    for sample, loss in sorted(step.sample_losses.items()):
        yield SAMPLE_LOSS, str(sample), loss
    for name, value in step.metrics.items():
        yield name, "", value


SAMPLE_LOSS = "loss of sample"


def _moment(key: Key) -> tuple[int, bool, int, int]:
    """Sorts values by when they arise; those of one moment stay in the order of the log."""
    rollout_id, step, quantity, _ = key
    places = {SAMPLE_LOSS: 0, "loss": 1, "grad_norm": 3, "parameter": 4}
    return rollout_id, quantity == "parameter", step, places.get(quantity.removeprefix("critic "), 2)


def _agree(logged: Value | None, found: Value | None, tolerance: float | None) -> bool:
    if logged is None or found is None or isinstance(logged, str) or isinstance(found, str) or tolerance is None:
        return logged == found
    return abs(logged - found) <= tolerance * max(abs(logged), abs(found), 0.01)


def _shown(value: Value | None) -> str:
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


def _of(layout: Mapping[str, str | int], name: str) -> str:
    return str(layout.get(name, "not recorded"))


def sample_changes(logged: Sequence[RolloutResult], found: Sequence[RolloutResult]) -> list[SampleChange]:
    """Each sample's loss in the last rollout of both, the largest change first."""
    there, here = _sample_losses(logged), _sample_losses(found)
    changes = [SampleChange(sample, there.get(sample), here.get(sample)) for sample in sorted({*there, *here})]
    return sorted(changes, key=lambda change: -abs((change.found or 0.0) - (change.logged or 0.0)))


class SampleChange(msgspec.Struct, frozen=True):
    """One sample's part of the loss in the run, and under the changed settings."""

    sample_index: int
    logged: float | None
    found: float | None


def _sample_losses(results: Sequence[RolloutResult]) -> dict[int, float]:
    last = max((result.rollout_id for result in results), default=-1)
    return {
        sample: loss
        for result in results
        if result.rollout_id == last
        for step in result.steps
        for sample, loss in step.sample_losses.items()
    }
