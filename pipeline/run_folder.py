"""Where each thing lies in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recovery.home import run_of
from recovery.restore import parse_load
from recovery.run_on_disk import folder_name
from storage.dead_letters import letters_folder
from storage.files import make_folder
from vime.settings.groups import Settings


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; `root` is `--save`, unless a run elsewhere goes on that `--load` or its record there names."""

    root: Path
    queue: Path
    """Root of the straw pool."""
    output: str = "."
    """Folder for commits, as `recovery.run_on_disk` names it."""

    @classmethod
    def of(cls, settings: Settings) -> RunFolder:
        """Raises `RestoreError` where `--load` and `--save` hold different runs."""
        checkpoint = settings.checkpoint
        save = Path(checkpoint.save or "").resolve()
        is_run = checkpoint.load is not None and not settings.debug.trains_only
        load = parse_load(checkpoint.load or "")[0] if is_run else None
        root = run_of(save, load)
        data = (
            Path(settings.queue.rollout_data_dir).resolve()
            if settings.queue.rollout_data_dir
            else root / "rollout_data"
        )
        return cls(root, data / "pool", folder_name(save, root))

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def stalls(self) -> Path:
        """Times at which nothing went on, and who waited for whom."""
        return self.root / "stalls.jsonl"

    @property
    def incidents(self) -> Path:
        """Engines that get no requests, and how a session failed."""
        return self.root / "incidents.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    def settings_of(self, branch: str) -> Path:
        """Settings of one session; `settings` holds those of the newest."""
        return session_settings(self.root, branch)

    @property
    def bad_prompts(self) -> Path:
        """Records of the prompt file that were skipped."""
        return self.root / "bad_prompts.jsonl"

    @property
    def dead_letters(self) -> Path:
        """Samples that failed."""
        return letters_folder(self.root)

    @property
    def session_lock(self) -> Path:
        return self.root / "rollout" / "session.lock"

    @property
    def step_log(self) -> Path:
        """Folder of the step log of a queue in memory; that of a queue on disk lies with it."""
        return self.root / "rollout" / "step_log"

    def coordinator_config(self, session: str) -> Path:
        """What the coordinator was told last in a session whose trainer went back to a commit."""
        return self.root / "rollout" / f"coordinator_{session}.msgpack"

    @property
    def tried_version(self) -> Path:
        """The highest policy version that was ever tried; see `pipeline.known_versions`."""
        return self.root / "rollout" / "tried_version.json"

    @property
    def processes(self) -> Path:
        """Ids of the running processes, for people and for tests that kill them."""
        return self.root / "processes.json"

    @property
    def kept_engines(self) -> Path:
        """Claims and lease of engines that outlive their driver."""
        return self.root / "rollout" / "kept_engines"

    @property
    def router_ports(self) -> Path:
        """Ports that routers had, for a session that goes on with kept engines."""
        return self.kept_engines / "routers.json"

    def training_log(self, rank: int) -> Path:
        return self.root / "training_log" / f"rank_{rank}.jsonl"

    @property
    def token_log(self) -> Path:
        """What the trainer made of each token."""
        return self.root / "token_log"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def prometheus(self) -> Path:
        """Addresses of each process's `/metrics`, for the `file_sd_configs` of Prometheus."""
        return self.root / "prometheus"

    def prometheus_target(self, process: str) -> Path:
        return self.prometheus / f"{process}.json"

    @property
    def profiles(self) -> Path:
        """Traces of trainer ranks, where they are asked for."""
        return self.root / "profiles"

    def make(self) -> None:
        """Create the folders."""
        for folder in (self.root / "rollout", self.root / "training_log", self.logs):
            make_folder(folder)


def session_settings(root: Path, branch: str) -> Path:
    """Settings of one session of the run in `root`."""
    return root / "rollout" / f"settings_{branch}.json"
