"""DeepSpeed's two version pins: ``current`` in this environment, ``paper`` in one beside it.

``paper`` is the version that arXiv 2602.06499 compares with. Its environment sees everything of
this one and replaces what differs. Imports nothing, for programs that must not wait for torch.
"""

import os
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

Pin = Literal["current", "paper"]
PINS: tuple[Pin, ...] = ("current", "paper")

#: The command that makes each pin's environment.
COMMANDS: dict[Pin, str] = {"current": "make setup", "paper": "make baselines"}


def version(pin: Pin) -> str | None:
    """The version of DeepSpeed under this pin; ``None`` if it is not installed."""
    if pin == "paper" and not (_environment() / "setup.stamp").exists():
        return None  # An installation that was cut short has no stamp.
    return _version_on(*(sys.path if pin == "current" else [str(_packages())]))


@cache
def _version_on(*path: str) -> str | None:
    distribution = next(iter(metadata.distributions(name="deepspeed", path=list(path))), None)
    return None if distribution is None else distribution.version


def variables(pin: Pin) -> dict[str, str]:
    """Environment variables with which a process of this environment imports that DeepSpeed."""
    if pin == "current":
        return {}
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {
        "PYTHONPATH": os.pathsep.join([str(_packages()), *inherited]),
        # Operators are compiled under names that do not tell their versions apart.
        "TORCH_EXTENSIONS_DIR": str(_environment() / "operators"),
    }


def _environment() -> Path:
    """The path at which scripts/setup.sh makes the other environment."""
    return Path(f"{sys.prefix}-paper")


def _packages() -> Path:
    """The folder of the other environment's own packages."""
    return _environment() / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
