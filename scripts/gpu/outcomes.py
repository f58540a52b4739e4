"""A pytest plugin: each test's outcome as a line, written at once, so that a kill loses none."""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "FCDP_GPU_OUTCOMES"


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", report.longrepr)


def _write(test: str, outcome: str, said: object) -> None:
    # A skip's is (file, line, reason); an error's ends with what was raised.
    last = said[-1] if isinstance(said, tuple) else str(said or "").strip()
    line = {"test": test, "outcome": outcome, "said": str(last)[-600:]}
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
