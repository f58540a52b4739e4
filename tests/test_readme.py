"""What the README says is what the committed records say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.ranks
def test_the_tables_are_those_of_the_records() -> None:
    check = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_link_into_the_repository_leads_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", readme)
    inside = [link for link in links if "://" not in link]
    assert len(inside) > 5
    assert [link for link in inside if not (ROOT / link).exists()] == []
