from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.records.provenance import ROOT

SCRIPTS = [
    *(path for path in sorted((ROOT / "launch").iterdir()) if path.suffix != ".yaml"),
    *sorted((ROOT / "scripts").glob("*.sh")),
    ROOT / ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_linter_has_no_complaint(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # Below a warning it asks about functions that are called by name.
    done = subprocess.run(
        [shellcheck, "--severity=warning", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
