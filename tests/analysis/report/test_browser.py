"""The script of the pages, in headless Chromium: a heading sorts its column."""

import html
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.report import reproduction, run
from tests import programs
from tests.analysis import made_up
from tests.analysis.conftest import write_records

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: sudo apt-get install chromium")
]

#: Clicks the heading COLUMN twice, and leaves what the column held after each click in the page.
PROBE = """
<pre id="seen"></pre>
<script>
const heading = [...document.querySelectorAll("thead th")].find(h => h.textContent === "COLUMN");
const clicked = () => {
  heading.querySelector("button").click();
  const rows = [...heading.closest("table").tBodies[0].rows];
  return [heading.ariaSort, rows.map(row => row.cells[heading.cellIndex].textContent.trim())];
};
document.getElementById("seen").textContent = JSON.stringify([clicked(), clicked()]);
</script>
"""


def sorted_by(column: str, page: Path) -> list[tuple[str, list[str]]]:
    """The order of a column after one click on its heading and after two, with its cells."""
    probed = page.read_text("utf-8").replace("</body>", PROBE.replace("COLUMN", column) + "</body>")
    page.write_text(probed, "utf-8")
    shown = programs.printed(
        *(CHROMIUM, "--headless=new", "--disable-gpu", "--dump-dom"),
        f"--user-data-dir={page.parent / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        page.as_uri(),
        within_s=120,
    )
    match = re.search(r'<pre id="seen">(.+?)</pre>', shown, re.DOTALL)
    assert match is not None, shown[-2000:]
    seen: list[tuple[str, list[str]]] = json.loads(html.unescape(match[1]))
    return seen


def check_sorted(seen: Any) -> None:
    """Cells stand by value, upwards and then downwards, those without a number last."""
    assert [order for order, _ in seen] == ["ascending", "descending"]
    for order, cells in seen:
        # A cell without a number may say how well it is known.
        filled = [value(cell) for cell in cells if not cell.startswith("–")]
        assert len(filled) > 1
        assert filled == sorted(filled, reverse=order == "descending")
        assert all(cell.startswith("–") for cell in cells[len(filled) :])


def value(cell: str) -> float:
    number, _, unit = cell.partition(" ")
    scale = {"GB": 1e9, "MB": 1e6}.get(unit, 1)
    return float(number.replace(",", "").rstrip("×")) * scale


def test_a_heading_sorts_the_papers_numbers(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (results / "parity").mkdir(parents=True)
    write_records(made_up.records(), results / "parity" / "records.jsonl")
    check_sorted(sorted_by("Paper", reproduction.write(results)["report"]))


def test_a_heading_sorts_a_runs_cells(tmp_path: Path) -> None:
    files = {tmp_path / "records.jsonl": made_up.records()}
    check_sorted(sorted_by("s/step", run.write(files, tmp_path, "deepspeed-zero3").report))
