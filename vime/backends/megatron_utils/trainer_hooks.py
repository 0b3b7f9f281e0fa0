"""Functions of the user's own that the trainer calls (--custom-megatron-...-path, --custom-model-provider-path)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import TrainerError


@dataclass(frozen=True)
class Hook:
    """One function, and where the user named it."""

    flag: str
    path: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """What the function returns. Raises `TrainerError`, which names the hook, for whatever it raises."""
        try:
            return self.function(*args, **keywords)
        except Exception as error:  # the boundary to user code, which may raise anything
            raise TrainerError(
                f"{self.flag} {self.path} raised {type(error).__name__}: {error}",
                next_step="Correct the function; the trainer's log has the traceback.",
            ) from error


@dataclass(frozen=True)
class StepPlace:
    """Which optimizer step of a run: `step_id` counts the steps of one rollout batch from 0."""

    rollout_id: int = 0
    step_id: int = 0


def _megatrons_own(args: argparse.Namespace) -> Any:
    return args


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """The user's functions; None where there is none."""

    args: Callable[[argparse.Namespace], Any] = _megatrons_own
    """From Megatron's arguments to the `args` that hooks get."""
    model_provider: Hook | None = None
    """(pre_process, post_process, vp_stage=None) -> one chunk of the model."""
    init: Hook | None = None
    """(args), after Megatron's initialisation and before the model is built."""
    before_log_prob: Hook | None = None
    """(args, model, store_prefix), before log-probabilities of a rollout batch are computed."""
    before_train_step: Hook | None = None
    """(args, rollout_id, step_id, model, optimizer, scheduler), when gradients are zero and before the forward pass."""

    def initialised(self, args: argparse.Namespace) -> None:
        if self.init is not None:
            self.init(self.args(args))

    def computes_log_probs(self, args: argparse.Namespace, model: Sequence[Any], store_prefix: str) -> None:
        """`store_prefix` says of which model: "" the actor, "ref_" and "teacher_" the others."""
        if self.before_log_prob is not None:
            self.before_log_prob(self.args(args), model, store_prefix)

    def takes_step(
        self, args: argparse.Namespace, place: StepPlace, model: Sequence[Any], optimizer: Any, scheduler: Any
    ) -> None:
        if self.before_train_step is not None:
            step = (place.rollout_id, place.step_id)
            self.before_train_step(self.args(args), *step, model, optimizer, scheduler)
