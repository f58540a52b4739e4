"""The pages in headless Chromium: nothing wider than a phone, both colour schemes, sorting."""

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

PHONE, DESK = 390, 1280
PROBE = """
<script>
const problems = [];
addEventListener("error", event => problems.push(event.message));
addEventListener("load", () => {
  const light = (colour, inverted) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map(v => inverted ? 1 - v / 255 : v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const contrasts = ["body", ".soft", "th", "figcaption", "dt", ".big", ".verdict", ".failed"]
    .flatMap(name => [...document.querySelectorAll(name)].slice(0, 40))
    .map(item => light(getComputedStyle(item).color))
    .map(ink => (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05));
  const head = [...document.querySelectorAll("thead th")].find(h => COLUMNS.has(h.textContent));
  const column = () => [...head.closest("table").tBodies[0].rows]
    .map(row => row.cells[head.cellIndex].textContent.trim());
  head.querySelector("button").click();
  const up = column(), first = head.ariaSort;
  head.querySelector("button").click();
  parent.postMessage({
    problems, up, down: column(), sorted: [first, head.ariaSort],
    width: innerWidth, content: document.documentElement.scrollWidth,
    contrast: Math.min(...contrasts), ground,
    pictures: [...document.querySelectorAll("figure svg")].map(picture => {
      const box = picture.getBoundingClientRect(), ids = [...picture.querySelectorAll("[id]")];
      const smallest = Math.min(...[...picture.querySelectorAll("text")]
        .map(text => parseFloat(getComputedStyle(text).fontSize)));
      return {
        letters: smallest * box.width / picture.viewBox.baseVal.width,
        scrolls: getComputedStyle(picture.closest(".scroll")).overflowX === "auto",
        inside: box.width <= picture.closest(".scroll").scrollWidth,
        text: Math.min(...[...picture.querySelectorAll("text")]
          .map(text => light(getComputedStyle(text).fill,
                             getComputedStyle(picture).filter.startsWith("invert")))
          .map(ink => (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05))),
        ids: ids.map(item => item.id),
      };
    }),
    records: [...document.querySelectorAll("figure")]
      .every(figure => figure.querySelector("figcaption a[href*='.json']")),
    unnamed: document.querySelectorAll(
      "svg:not([aria-label]), img:not([alt]), [role=region]:not([aria-label])").length,
  }, "*");
});
</script>
"""
FRAMES = """<!doctype html><meta charset="utf-8"><pre id="reports"></pre>
<script>
const reports = [];
addEventListener("message", event => {
  reports.push(event.data);
  document.getElementById("reports").textContent = JSON.stringify(reports);
});
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both pages of made-up records, each with the probe in it."""
    root = tmp_path_factory.mktemp("root")
    results = root / "results"
    (results / "parity").mkdir(parents=True)
    write_records(made_up.records(), results / "parity" / "records.jsonl")
    files = {root / "records.jsonl": made_up.records()}
    pages = {
        "claims": (reproduction.write(results)["report"], '["Paper"]'),
        "report": (run.write(files, root, "deepspeed-zero3").report, '["s/step"]'),
    }
    for name, (page, columns) in pages.items():
        probe = PROBE.replace("COLUMNS", f"new Set({columns})")
        changed = page.read_text("utf-8").replace("</head>", f"{probe}</head>")
        (root / f"{name}.html").write_text(changed, "utf-8")
        frames = "".join(
            f'<iframe src="{name}.html" style="width:{width}px;height:800px;border:0"></iframe>'
            for width in (PHONE, DESK)
        )
        (root / f"{name}-frames.html").write_text(FRAMES + frames, "utf-8")
    return root


def browse(page: Path, *options: str) -> list[dict[str, Any]]:
    """The probe's reports from both frames, the narrow one first."""
    command = [
        CHROMIUM,
        "--headless=new",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        f"--user-data-dir={page.parent / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *options,
        "--dump-dom",
        page.as_uri(),
    ]
    shown = programs.printed(*command, within_s=120)
    match = re.search(r'<pre id="reports">(.*?)</pre>', shown, re.DOTALL)
    assert match is not None, shown[:2000]
    return sorted(json.loads(html.unescape(match[1])), key=lambda item: int(item["width"]))


@pytest.mark.parametrize("page", ["claims", "report"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_whole_on_a_phone_and_a_desk_in_both_schemes(
    page: str, dark: bool, folder: Path
) -> None:
    reports = browse(
        folder / f"{page}-frames.html", f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    )
    assert [item["width"] for item in reports] == [PHONE, DESK]
    for item in reports:
        assert item["problems"] == []
        assert item["content"] <= item["width"]
        assert item["pictures"]
        for picture in item["pictures"]:
            assert picture["letters"] >= 9  # pixels
            assert picture["scrolls"]
            assert picture["inside"]
            assert picture["text"] >= 3
        ids = [name for picture in item["pictures"] for name in picture["ids"]]
        assert len(set(ids)) == len(ids)
        assert item["records"]
        assert item["unnamed"] == 0
        assert (item["ground"] < 0.1) is dark
        assert item["contrast"] >= 4.5  # WCAG 2.2, AA


@pytest.mark.parametrize("page", ["claims", "report"])
def test_a_heading_sorts_its_column_by_value_with_empty_cells_last(page: str, folder: Path) -> None:
    for item in browse(folder / f"{page}-frames.html"):
        assert item["sorted"] == ["ascending", "descending"]
        for column, descending in ((item["up"], False), (item["down"], True)):
            # A cell without a number may say how well it is known.
            filled = [value(cell) for cell in column if not cell.startswith("–")]
            assert len(filled) > 1
            assert filled == sorted(filled, reverse=descending)
            assert all(cell.startswith("–") for cell in column[len(filled) :])


def value(cell: str) -> float:
    number, _, unit = cell.partition(" ")
    scale = {"GB": 1e9, "MB": 1e6}.get(unit, 1)
    return float(number.replace(",", "").rstrip("×")) * scale
