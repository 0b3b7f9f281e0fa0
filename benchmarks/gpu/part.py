"""What every part of the suite has: a command line, a budget of time, stages that are not repeated, and a report."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import AGAIN, BudgetSpentError, Job, describe_devices, num_gpus, without_folder
from benchmarks.report import benchmark_parser, build_report, print_report
from storage.files import write_atomically
from vime.errors import SettingsError, VimeError

BUDGET_S = 450.0
RESULTS = Path(__file__).resolve().parents[1] / "results"
AGAIN_STATUS = 75
"""Exit status when the budget is spent before the last stage, as `EX_TEMPFAIL` of sysexits(3)."""
EPILOG = """
--folder keeps what a part needs and the values of its stages: with the same folder again it goes on after those that
have ended. A call takes BUDGET s at most, then its exit status is 75 and another call does the rest. Calls with one
folder and each with another --only may run side by side, on a GPU each (CUDA_VISIBLE_DEVICES); a last one without it
reports what all have found. Without a GPU, or with --quick, everything is small. Flags that it doesn't know go to
`vime train`, where a part starts one.
"""


class Stages:
    """One call of a part: its folder, its devices, its time, and what earlier calls have found."""

    def __init__(
        self,
        folder: Path,
        *,
        small: bool,
        gpus: int,
        budget_s: float = math.inf,
        more: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> None:
        """`more` are flags for `vime train`; `only` are the choices of the part that are wanted, all where it is empty.

        Raises `SettingsError` for a folder of other settings.
        """
        self.folder, self.small, self.gpus, self.more, self.only = folder, small, gpus, list(more), list(only)
        self.deadline = time.monotonic() + budget_s
        self._settings = {"small": small, "gpus": gpus, "more": self.more}
        for stage in self._ended():
            if stage["settings"] != self._settings:
                raise SettingsError(
                    f"{folder} holds stages of {stage['settings']}, allowed: {self._settings}.",
                    next_step="Give the flags of the call that began it, or another --folder.",
                )

    @property
    def seconds(self) -> float:
        """That all stages have taken, in all calls."""
        return float(sum(stage["seconds"] for stage in self._ended()))

    def wants(self, choice: str) -> bool:
        """Whether `--only` leaves it in."""
        return not self.only or choice in self.only

    def once(self, name: str, measure: Callable[[], Mapping[str, float]], *, needs_s: float = 60.0) -> dict[str, float]:
        """Values of a stage, measured unless an earlier call has done it.

        Raises `BudgetSpentError` when less than `needs_s` is left for it.
        """
        path = self._folder_of_stages / f"{name}.json"
        if not path.exists():
            started = time.monotonic()
            if started + needs_s > self.deadline:
                raise BudgetSpentError(
                    f"The stage {name} needs about {needs_s:.0f} s, left: {self.deadline - started:.0f} s.",
                    next_step=AGAIN,
                )
            values = {key: float(value) for key, value in measure().items()}
            stage = {"settings": self._settings, "values": values, "seconds": round(time.monotonic() - started, 1)}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(stage, indent=1).encode())
        return dict(json.loads(path.read_bytes())["values"])

    @property
    def _folder_of_stages(self) -> Path:
        return self.folder / "stages"

    def _ended(self) -> list[dict[str, Any]]:
        """What every stage has found, in calls that run at the same time, too."""
        return [json.loads(path.read_bytes()) for path in sorted(self._folder_of_stages.glob("*.json"))]

    def job(self, name: str, command: Sequence[str]) -> Job:
        """A job of this call, in a folder of its own."""
        return Job([*command, *self.more], self.folder / name, self.folder / f"{name}.log", self.deadline)


@dataclass(frozen=True)
class Part:
    """A part of the suite."""

    name: str
    """Of its module."""
    description: str
    measure: Callable[[Stages], Mapping[str, float]]
    packages: tuple[str, ...] = ("vllm", "torch", "megatron-core", "ray")
    choices: tuple[str, ...] = ()
    """That `--only` chooses from."""


def run_part(part: Part, argv: Sequence[str] | None) -> int:
    """Measure a part and print its report; the exit status."""
    epilog = EPILOG.replace("BUDGET", f"{BUDGET_S:.0f}")
    parser = benchmark_parser(f"gpu.{part.name}", part.description + epilog, repeats=1)
    parser.add_argument("--folder", type=Path, help="where stages and logs stay; a new temporary folder when left out")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds of this call (default {BUDGET_S:.0f})")
    parser.add_argument("--keep", action="store_true", help="write the report below benchmarks/results, too")
    if part.choices:
        parser.add_argument("--only", action="append", choices=part.choices, help="measure this alone; may be repeated")
    options, more = parser.parse_known_args(argv)
    try:
        report = _measured(part, options, more, argv)
    except BudgetSpentError as error:
        print(f"not done yet: {error}", file=sys.stderr)
        return AGAIN_STATUS
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.keep:
        folder = RESULTS / results_folder(num_gpus())
        folder.mkdir(exist_ok=True)
        (folder / f"gpu.{part.name}.json").write_text(json.dumps(report, indent=4) + "\n")
    print_report(report, only_json=options.json)
    return 0


def results_folder(gpus: int) -> str:
    """Of results that are kept; those of trainer and engine on one GPU are apart."""
    return "gpu_shared" if gpus == 1 else "gpu"


def _measured(
    part: Part, options: argparse.Namespace, more: Sequence[str], argv: Sequence[str] | None
) -> dict[str, Any]:
    folder = (options.folder or Path(tempfile.mkdtemp(prefix=f"vime-{part.name}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    gpus = num_gpus()
    stages = Stages(
        folder,
        small=options.quick or not gpus,
        gpus=gpus,
        budget_s=options.budget,
        more=more,
        only=(options.only or ()) if part.choices else (),
    )
    try:
        values = part.measure(stages)
    except BudgetSpentError:
        print(f"--folder {folder} holds what has been measured.", file=sys.stderr)
        raise
    report = build_report(
        f"gpu.{part.name}",
        {name: [value] for name, value in values.items()},
        argv=without_folder(argv),
        packages=part.packages,
        folder=folder,
    )
    report["machine"] |= describe_devices()
    report["seconds"] = round(stages.seconds, 1)
    return report
