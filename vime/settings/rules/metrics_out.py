"""Rules for copies of the metrics outside of the run folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem


def the_sinks_library_is_installed(settings: Settings) -> Iterator[Problem]:
    """A library that is missing would only be noticed by a sink's own process, after the start."""
    logging = settings.logging
    for flag, is_used, package in (
        ("--use-wandb", logging.use_wandb, "wandb"),
        ("--use-tensorboard", logging.use_tensorboard, "tensorboardX"),
    ):
        if is_used and importlib.util.find_spec(package) is None:
            yield problem(
                settings,
                flag,
                found=f"{flag}: the package {package} is not installed",
                allowed="left out, or the package",
                reason="It writes the metrics.",
                next_step=f'Install it: pip install "{package}".',
            )


RULES = (the_sinks_library_is_installed,)
