"""Checks of optimizer steps for continuous integration: a step that fails one ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from storage.files import append_durably
from vime.backends.megatron_utils.trainer_hooks import StepPlace
from vime.errors import SettingsError, TrainerError, reason_of
from vime.settings.groups import Settings
from vime.settings.schemas.megatron_config import Role

KL_TOLERANCE = 1e-3
"""Nats by which a KL that starts at zero may differ from it: two passes over the same tokens round differently."""
NORM_TOLERANCE = 0.01
"""Part of a gradient norm by which it may differ from the one that must be met."""
_NORM_NAMES: dict[Role, str] = {"actor": "grad_norm", "critic": "critic_grad_norm"}


class GradientNorm(msgspec.Struct, frozen=True):
    """A line of the file of --ci-save-grad-norm, which --ci-load-grad-norm reads: one optimizer step."""

    role: Role
    rollout_id: int
    step_id: int
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True)
class CheckSettings:
    """What is checked of each optimizer step."""

    log_prob_gap: float | None = None
    """Largest mean difference of the sampler's log-probabilities and the trainer's; None checks none."""
    policy_kl_starts_at_zero: bool = False
    """The policy is the old one in the first step of each rollout batch."""
    reference_kl_starts_at_zero: bool = False
    """The policy is the reference in the first step of the run."""
    norms_to: Path | None = None
    norms_from: Path | None = None

    @classmethod
    def of(cls, settings: Settings, rank: int, *, starts_elsewhere: bool) -> CheckSettings:
        """`starts_elsewhere` says that the actor starts from other weights than the reference's."""
        debug, objective = settings.debug, settings.objective
        checks_kl = debug.ci_test and not debug.ci_disable_kl_checker
        saved, loaded = debug.ci_save_grad_norm, debug.ci_load_grad_norm
        return cls(
            log_prob_gap=debug.ci_train_rollout_logprob_abs_diff_threshold if debug.ci_test else None,
            policy_kl_starts_at_zero=checks_kl and not objective.use_rollout_logprobs,
            reference_kl_starts_at_zero=checks_kl and not starts_elsewhere,
            norms_to=None if saved is None or rank else Path(saved),
            norms_from=None if loaded is None else Path(loaded),
        )


class StepChecks:
    """Looks at the metrics of each step, which are equal on all ranks."""

    def __init__(self, settings: CheckSettings) -> None:
        """Raises `SettingsError` for a file of gradient norms that can't be read."""
        self._settings = settings
        self._expected = None if settings.norms_from is None else read_norms(settings.norms_from)

    def check(self, role: Role, place: StepPlace, metrics: Mapping[str, float]) -> None:
        """Raise `TrainerError` for a step that fails a check; keep its gradient norm where it is asked for."""
        settings, where = self._settings, f"rollout {place.rollout_id}, step {place.step_id} of the {role}"
        if role == "actor" and place.step_id == 0 and settings.policy_kl_starts_at_zero:
            _check_zero(where, "ppo_kl", metrics, KL_TOLERANCE)
            _check_zero(where, "pg_clipfrac", metrics, 0.0)
        if role == "actor" and place == StepPlace(0, 0) and settings.reference_kl_starts_at_zero:
            _check_zero(where, "kl_loss", metrics, KL_TOLERANCE)
        gap = metrics.get("train_rollout_logprob_abs_diff", 0.0)
        if role == "actor" and settings.log_prob_gap is not None and gap > settings.log_prob_gap:
            raise TrainerError(
                f"--ci-test: {where}: train_rollout_logprob_abs_diff is {gap:g}, allowed: at most "
                f"{settings.log_prob_gap:g} (--ci-train-rollout-logprob-abs-diff-threshold).",
                next_step="Find what trainer and engine do differently with vime parity.",
            )
        if settings.norms_to is not None or self._expected is not None:
            self._check_norm(where, GradientNorm(role, place.rollout_id, place.step_id, metrics[_NORM_NAMES[role]]))

    def _check_norm(self, where: str, found: GradientNorm) -> None:
        if self._settings.norms_to is not None:
            append_durably(self._settings.norms_to, msgspec.json.encode(found))
        if self._expected is None:
            return
        expected = self._expected.get((found.role, found.rollout_id, found.step_id))
        if expected is None or not math.isclose(found.grad_norm, expected, rel_tol=NORM_TOLERANCE):
            raise TrainerError(
                f"--ci-load-grad-norm {self._settings.norms_from}: {where}: the gradient norm is {found.grad_norm:g}, "
                f"allowed: {'a step that the file has' if expected is None else f'{expected:g} within 1%'}.",
                next_step="Train with the samples, weights and settings that the file was written with.",
            )


def read_norms(path: Path) -> dict[tuple[Role, int, int], float]:
    """(role, rollout, step) -> gradient norm; the last one of a step that was repeated. Raises `SettingsError`."""
    try:
        lines = path.read_bytes().splitlines()
        norms = [msgspec.json.decode(line, type=GradientNorm) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            f"--ci-load-grad-norm {path} can't be read: {reason_of(error)}, allowed: a file of --ci-save-grad-norm.",
            next_step="Correct the path, or write the file with --ci-save-grad-norm.",
        ) from error
    return {(norm.role, norm.rollout_id, norm.step_id): norm.grad_norm for norm in norms}


def _check_zero(where: str, name: str, metrics: Mapping[str, float], tolerance: float) -> None:
    if abs(metrics.get(name, 0.0)) > tolerance:
        raise TrainerError(
            f"--ci-test: {where}: {name} is {metrics[name]:g}, allowed: 0, within {tolerance:g}.",
            next_step="The policy is not the one that it is compared with; --ci-disable-kl-checker leaves this out.",
        )
