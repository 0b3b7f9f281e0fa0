"""The models beside the actor that only score tokens: a reference for the KL, a teacher to distil from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.backends.megatron_utils.background_save import BackgroundSave
from vime.backends.megatron_utils.checkpoint_weights import load_source, load_weights, save_weights
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.frozen_weights import FrozenWeights
from vime.backends.megatron_utils.optimizer import Learner
from vime.backends.megatron_utils.weight_source import WeightSource

REFERENCE_FOLDER = "reference"
"""Part of a checkpoint: a reference that isn't that of --ref-load any more."""


class FrozenModels:
    """Reference and teacher of one rank, as far as the objective asks for them. Every method is collective."""

    def __init__(
        self, learner: Learner, args: argparse.Namespace, hf_config: Mapping[str, Any], config: TrainerConfig
    ) -> None:
        self._learner, self._args, self._hf_config, self._config = learner, args, hf_config, config
        self.reference: FrozenWeights | None = None
        self.teacher: FrozenWeights | None = None
        self._reference_has_moved = False

    def load_start(self) -> None:
        """For a run that begins: the actor starts as the reference, where there is one.

        Raises what `load_source` raises.
        """
        source = self._config.reference
        if source is not None:
            load_source(self._learner.chunks, self._hf_config, source)
            self._learner.optimizer.reload_model_params()
            if self._config.objective.needs_reference:
                self.reference = FrozenWeights(self._learner.chunks)
        self._load_teacher()

    def load(self, checkpoint: Path) -> None:
        """For a run that goes on from `checkpoint`, which may have a reference of its own.

        Raises what `load_source` and `load_weights` raise.
        """
        saved = checkpoint / REFERENCE_FOLDER
        self._reference_has_moved = saved.is_dir()
        if self._config.objective.needs_reference and self._config.reference is not None:
            self.reference = FrozenWeights(self._learner.chunks)
            with self.reference.in_place():
                if self._reference_has_moved:
                    load_weights(self._learner.chunks, saved)
                else:
                    self._load(self._config.reference)
        self._load_teacher()

    def save(self, checkpoint: Path, *, background: BackgroundSave | None = None) -> None:
        """Add what can't be loaded from elsewhere to a checkpoint that is otherwise complete."""
        if self.reference is not None and self._reference_has_moved:
            with self.reference.in_place():
                folder = checkpoint / REFERENCE_FOLDER
                save_weights(self._learner.chunks, self._args, folder, background=background)

    def rollout_trained(self, rollout_id: int) -> None:
        """The actor as it is after this rollout batch becomes the reference, at the interval of the settings."""
        interval = self._config.reference_update_interval
        if self.reference is not None and interval is not None and (rollout_id + 1) % interval == 0:
            self.reference.copy_model()
            self._reference_has_moved = True

    def _load_teacher(self) -> None:
        if self._config.teacher is not None:
            self.teacher = FrozenWeights(self._learner.chunks)
            with self.teacher.in_place():
                self._load(self._config.teacher)

    def _load(self, source: WeightSource) -> None:
        load_source(self._learner.chunks, self._hf_config, source)
