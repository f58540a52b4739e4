"""Where a record comes from: the commit, the versions, the machine.

What is recorded may be published, so it names no host, no user and no path, and copies nothing
from the environment.
"""

import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.records.environment import without_secrets

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "pyzmq")
_NVIDIA = Path("/proc/driver/nvidia")
_CPU_TIME = Path("/sys/fs/cgroup/cpu.max")
#: An error text keeps its beginning, where the rank is named, and its end, where the cause is.
_LONGEST_ERROR = 12_000


@dataclass(frozen=True)
class Provenance:
    """The part of a record that is the same for all cells of one start."""

    commit: str | None
    versions: dict[str, str]
    hardware: dict[str, Any]


def gather() -> Provenance:
    """Gather it once; it holds for the whole run."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    hardware = {
        "cpu": _cpu_model(),
        "cores": len(cores()),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        **_gpus(),
    }
    return Provenance(_commit(), versions, hardware)


def scrub(text: str) -> str:
    """The text without this machine's paths and names and without secrets, and not too long."""
    text = without_secrets(text, os.environ)
    replacements = {f"{ROOT}{os.sep}": "", f"{sys.prefix}{os.sep}": "<python>/"}
    for home in (os.environ.get("HOME"), str(Path.home())):
        if home and home != os.sep:
            replacements[f"{home}{os.sep}"] = "~/"
    # The longest first: the repository may lie in the home directory.
    for path in sorted(replacements, key=len, reverse=True):
        text = text.replace(path, replacements[path])
    text = re.sub(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)", "<host>", text)
    if len(text) > _LONGEST_ERROR:
        cut = len(text) - _LONGEST_ERROR
        head, tail = text[: _LONGEST_ERROR // 4], text[-3 * _LONGEST_ERROR // 4 :]
        text = f"{head}\n… {cut} characters left out …\n{tail}"
    # A rank's output may hold half a character; a record is UTF-8.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _commit() -> str | None:
    """The commit, with ``-dirty`` if the tree differs from it; ``None`` outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain")
    return f"{commit}-dirty" if changes or changes is None else commit


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _gpus() -> dict[str, Any]:
    """Names of the GPUs, as the driver's files give them; nothing where there is none."""
    files = sorted(_NVIDIA.glob("gpus/*/information"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    models = re.findall(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
    return {"gpu": ", ".join(sorted(set(models))), "gpus": len(models)} if models else {}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Arm's kernel gives no model name.
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.machine()


def cores() -> list[int]:
    """Cores that this process may use: of a container, no more than it has the time of."""
    allowed = sorted(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_TIME.read_text(encoding="utf-8").split()
    except OSError:
        return allowed
    return allowed[: max(1, int(quota) // int(period))] if quota.isdigit() else allowed


def memory_bytes() -> int:
    """Memory of the machine, or as much of it as a container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
