"""Where each thing lies in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage.dead_letters import letters_folder
from storage.files import make_folder
from vime.settings.groups import Settings


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; `root` is `--save`."""

    root: Path
    queue: Path
    """Root of the straw pool."""

    @classmethod
    def of(cls, settings: Settings) -> RunFolder:
        root = Path(settings.checkpoint.save or "").resolve()
        data = (
            Path(settings.queue.rollout_data_dir).resolve()
            if settings.queue.rollout_data_dir
            else root / "rollout_data"
        )
        return cls(root, data / "pool")

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

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

    @property
    def processes(self) -> Path:
        """Ids of the running processes, for people and for tests that kill them."""
        return self.root / "processes.json"

    def training_log(self, rank: int) -> Path:
        return self.root / "training_log" / f"rank_{rank}.jsonl"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

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
