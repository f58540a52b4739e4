"""Programs that tests start and wait for."""

import os
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def ended(
    *words: object,
    folder: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
    within_s: float | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ``variables`` are set besides its environment."""
    return subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


def printed(*words: object, **options: Any) -> str:
    """The output of a program that must succeed; the options are those of ``ended``."""
    done = ended(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def written(path: Path, text: str) -> Path:
    """Write a program: a shell script, unless its text names another interpreter."""
    text = textwrap.dedent(text)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, also where these tests were started by make."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return ended("make", *arguments, environment=outside)
