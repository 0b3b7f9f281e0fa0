"""Ray, as a run uses it: one private instance a run, placement checked before it is asked for, nothing left behind."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.devices import CPU_SLOTS_PER_CORE, cpu_slots, visible_gpus
from pipeline.guard import guarded
from vime.errors import RunFailedError, SettingsError
from vime.settings.groups import ClusterSettings

_Result = TypeVar("_Result")

CPU_SLOT = "vime_slot"
"""Custom resource that stands for one GPU on a machine without CUDA."""
OBJECT_STORE_BYTES = 128 * 2**20
"""Where only control messages travel through Ray; where samples do, Ray takes its own share of the memory."""


class Cluster:
    """A Ray instance with one bundle for each worker. Use with `with`."""

    def __init__(self, settings: ClusterSettings, num_producers: int, *, carries_samples: bool = False) -> None:
        training, generating = settings.num_trainer_ranks, settings.num_rollout_gpus
        self._shared = settings.colocate
        self._num_workers = max(training, generating) if self._shared else training + generating
        self._num_producers = num_producers
        self._object_store_bytes = None if carries_samples else OBJECT_STORE_BYTES
        gpus = visible_gpus()
        self._has_cuda = gpus > 0
        have = gpus if self._has_cuda else cpu_slots()
        if self._num_workers > have:
            kind = "GPUs" if self._has_cuda else f"worker processes ({CPU_SLOTS_PER_CORE} a core)"
            raise SettingsError(
                f"The run needs {training} (training) and {generating} (generation) = {self._num_workers} {kind}, "
                f"this machine has {have}.",
                next_step="Lower --actor-num-gpus-per-node or --rollout-num-gpus.",
            )
        self._slots = have
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        self.temporary = Path(tempfile.mkdtemp(prefix="vime-ray-"))
        self._exits.callback(shutil.rmtree, self.temporary, ignore_errors=True)
        self._exits.enter_context(guarded(self.temporary))
        ray.init(
            address="local",
            num_cpus=self._num_workers + self._num_producers + 2,
            num_gpus=self._slots if self._has_cuda else 0,
            resources=None if self._has_cuda else {CPU_SLOT: self._slots},
            object_store_memory=self._object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.temporary),
        )
        bundle = {"GPU": 1} if self._has_cuda else {CPU_SLOT: 1}
        self._placement = ray.util.placement_group([bundle] * self._num_workers, strategy="PACK")
        ray.get(self._placement.ready(), timeout=60)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ray.shutdown()
        self._exits.close()

    def spawn_worker(self, actor: type, bundle: int, *args: Any, env: dict[str, str] | None = None) -> Any:
        """Start an actor on one bundle (one GPU, or one slot); under --colocate trainer and engine share it."""
        part = 0.5 if self._shared else 1
        resources: dict[str, Any] = {"num_gpus": part} if self._has_cuda else {"resources": {CPU_SLOT: part}}
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        remote = ray.remote(num_cpus=0, **resources)(actor)
        return remote.options(scheduling_strategy=strategy, runtime_env=_runtime_env(env)).remote(*args)

    def end(self, actor: Any) -> None:
        """End an actor's process; its bundle is free for another one then."""
        ray.kill(actor)

    def spawn(self, actor: type, *args: Any, restarts: int = 0) -> Any:
        """Start an actor that needs no GPU; `restarts` < 0 lets Ray restart it for ever."""
        remote = ray.remote(num_cpus=0)(actor)
        options = {"max_restarts": restarts, "max_task_retries": restarts}
        return remote.options(runtime_env=_runtime_env(None), **options).remote(*args)


def _runtime_env(env: dict[str, str] | None) -> dict[str, Any]:
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(_import_path()), **(env or {})}}


def _import_path() -> list[str]:
    """The folder that vime was started in comes first, so that the user's own modules can be imported there too."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [str(Path.cwd()), *given]


async def answer(reference: Awaitable[_Result], process: str) -> _Result:
    """Await an actor's answer; its own exceptions come out as they were raised.

    Raises:
        RunFailedError: the process died.
    """
    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
        raise RunFailedError(
            f"{process} died. {reason}", next_step="Run the same command again; it resumes from the newest commit."
        ) from error
