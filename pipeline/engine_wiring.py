"""From settings to an engine's process."""

from __future__ import annotations

from pathlib import Path

from pipeline.devices import visible_gpus
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from vime.backends.vllm_utils.arguments import split_vllm_flags
from vime.backends.vllm_utils.kept import Keeping
from vime.backends.vllm_utils.launch import EngineLaunch, EnginePart
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.server import EngineServer
from vime.settings.groups import Settings
from vime.settings.rules.quantities import engine_workers
from vime.settings.served_models import EngineSpec


def build_engine_server(
    settings: Settings,
    folder: RunFolder,
    number: int,
    spec: EngineSpec,
    *,
    host: str = "127.0.0.1",
    part: EnginePart | None = None,
) -> EngineServer:
    """One engine, or its part on one node; `host` is that node's address. Only one without parts can be kept."""
    engine_args, _ = split_vllm_flags(spec.vllm_args)
    workers = engine_workers(spec)
    name = f"engine_{number}" if part is None or not part.number else f"engine_{number}_part_{part.number}"
    session = settings.queue.rollout_session_id
    return EngineServer(
        EngineLaunch(
            hf_checkpoint=Path(spec.checkpoint),
            host=host,
            port=0,
            log_path=folder.log(name),
            run_id=settings.queue.rollout_queue_run_id,
            seed=settings.trainer.seed + number,
            tensor_size=workers.tensor,
            num_workers=workers.total,
            part=part,
            sleeps=settings.cluster.engines_leave_memory,
            strict_parity=settings.engine.backend_parity == "strict",
            device="gpu" if visible_gpus() else "cpu",
            extra_args=tuple(engine_args),
            columns=engine_columns(settings, spec),
        ),
        stop_grace_s=settings.engine.rollout_cleanup_timeout,
        keeping=None if session is None or part is not None else Keeping(folder.kept_engines, name, session),
    )


def engine_columns(settings: Settings, spec: EngineSpec) -> SampleColumns:
    """What an engine must return of each token; one that isn't trained only scores and answers."""
    return sample_columns(settings) if spec.is_trained else NO_COLUMNS
