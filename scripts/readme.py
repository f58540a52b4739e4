"""Writes tables of the README and docs: from the committed records, a command, matrices' types.

python -m scripts.readme           rewrite the pages
python -m scripts.readme --check   fail if that would change one
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis import quality, text
from analysis.claims import papers
from analysis.compare.audit import audit
from analysis.load import runs
from analysis.report import simulator
from baselines import registry
from baselines.optimizers import AnyOptimizer
from docs import memory
from experiments.records.comparison import pooled
from experiments.records.record import Record, read
from experiments.records.workload import AnyData, AnyModel
from scripts import coding_speed, host_cost, matrices, tables

ROOT = Path(__file__).resolve().parent.parent
_PLAN = (
    "plan --model gpt-30b --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps --peft lora:8 "
    "--price-per-gpu-hour 0.5 "
    "--strategies fsdp2,fsdp2-hsdp,ddp,hpz,deepspeed-hpz,deepspeed-zero3,fcdp"
)
#: Where FCDP is worth its host memory and where it is not, by what stands in the README's heads.
_CASES = {
    "70B, LoRA 16, 8,192 tokens; 4 nodes × 8 L40S, 10 Gbit/s": (
        "plan --model llama-3-70b --peft lora:16 --sequence-length 8192 "
        "--nodes 4 --gpus 8 --gpu l40s --inter-node 10Gbps"
    ),
    "30B, LoRA 8, 512 tokens; 4 nodes × 8 A40, 1 Gbit/s": (
        "plan --model gpt-30b --peft lora:8 --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps"
    ),
}
_PLANNED = ("fcdp", "deepspeed-hpz-offload", "deepspeed-zero3", "fsdp2", "fsdp2-hsdp")
#: Commands at the doors of the site's front.
_DOORS = {
    "plan": f"experiments {next(iter(_CASES.values()))} --strategies {','.join(_PLANNED)}",
    "check": "analysis check results/paper/volume",
    "policies": (
        "experiments compare results/ablation:policy=none,k=4 results/ablation:policy=host,k=4"
    ),
}
#: The marked places of each page, and what is written there.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "result": lambda: tables.result(_records("headline")),
        "differences": lambda: tables.in_a_sentence(_records("delta-slow-link")),
        "planned": lambda: _planned(),
    },
    "docs/README.md": {
        name: partial(lambda door: _answered(door), door) for name, door in _DOORS.items()
    },
    "docs/differences.md": {
        "slow-link": lambda: tables.on_the_slow_link(_records("delta-slow-link"))
    },
    "docs/use.md": {"saving": lambda: tables.saving(committed("saving"))},
    "docs/planning.md": {"plan": lambda: _answered(f"experiments {_PLAN}")},
    "docs/measurements.md": {"slow-link": lambda: tables.kept(_records("slow-link"))},
    "docs/simulator.md": {"orders": lambda: _ordered()},
    "docs/reference.md": {
        "cells": matrices.of_cells,
        "strategies": matrices.of_strategies,
        "clusters": matrices.of_clusters,
        "models": partial(matrices.of_kinds, AnyModel),
        "data": partial(matrices.of_kinds, AnyData),
        "optimizers": partial(matrices.of_kinds, AnyOptimizer),
        "objectives": matrices.of_objectives,
    },
    "results/tables.md": {
        "reference": lambda: tables.condensed(_records("reference")),
        "unshaped": lambda: tables.condensed(_records("unshaped")),
        "unshaped-repeated": lambda: tables.condensed(_records("unshaped-repeated")),
        "link-bound": lambda: tables.bound_by_the_link(_records("link-bound")),
        "paper-emulated": lambda: tables.speeds(_records("paper-emulated")),
        "audit": lambda: tables.audited(audit(_records("parity"))),
        "baselines": lambda: tables.speeds(_records("baselines")),
        "workers": lambda: tables.kept_by_workers(
            [_records(f"co2-scaling/{workers}") for workers in ("two", "four", "eight")]
        ),
        "lag-short": lambda: tables.lag(_records("co2-loss")),
        "lag-longer": lambda: tables.lag(_records("co2-long")),
        "lag-long": lambda: tables.lag(_records("co2-tuned")),
        "behind": lambda: tables.behind(_records("co2-ablation")),
        "ablation": lambda: tables.ablated(_records("ablation")),
        "frozen": lambda: tables.by_base(_records("frozen")),
        "quantised": lambda: tables.over_seeds(_records("quantised")),
        "free-link": lambda: tables.on_a_free_link(_records("delta-unshaped")),
        "phases": lambda: _drawn("post-training", tables.by_phase),
        "rollouts": lambda: _drawn("rollout", tables.by_rollout),
        "quality": lambda: _drawn(
            quality.TIMES,
            lambda times: quality.markdown(quality.courses(_records(quality.SEARCH), times)),
        ),
        "coding": lambda: coding_speed.table(committed("coding-speed")),
        "host-time": lambda: host_cost.tables(committed("host-cost")),
        "memory": memory.of_caches,
        "others": memory.of_others,
        "traffic": memory.of_traffic,
    },
}


def _ordered() -> str:
    """How many pairs of cells the simulator has in the right order, and what its choice costs."""
    found = [run for run in runs.load(ROOT / "results") if isinstance(run, runs.Run)]
    rows = simulator.choices(simulator.orders(papers.load(), found))
    names = {
        "together, if nothing ran beside": "beside which nothing is known to have run",
        "together": "all",
    }
    head = ("Matrices", "Pairs", "In the right order", "Choices", "Cost more, median", "at most")
    columns = itemgetter("pairs", "right", "choices", "median_cost", "largest_cost")
    cells = ((names[row["matrix"]], *columns(row)) for row in rows if row["matrix"] in names)
    return text.table(head, ([*map(str, row)] for row in cells))


def rewritten(page: str, content: str) -> str:
    """The page's text with each marked place filled; raises ``ValueError`` if one is missing."""
    for name, table in PAGES[page].items():
        place = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        filled = table().replace("\\", r"\\")
        content, count = place.subn(rf"\g<1>{filled}\n\g<2>", content)
        if count != 1:
            raise ValueError(f"{page}: found {count} places for {name}, expected 1")
    return content


def _records(matrix: str) -> list[Record]:
    """A committed run's records, repetitions pooled."""
    return pooled(read(ROOT / "results" / matrix / "records.jsonl"))


def committed(name: str) -> dict[str, Any]:
    """The record of the last measurement by a script that was kept, in a folder of results."""
    file = ROOT / "results" / name / "record.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def _drawn(matrix: str, table: Callable[[list[Record]], str]) -> str:
    """The table, and the figures that are drawn beside its records."""
    folder = ROOT / "results" / matrix
    drawn = sorted([*folder.rglob("*phases.png"), *folder.rglob("quality.svg")])
    names = (each.stem.rpartition("-")[2] for each in drawn)
    places = (each.relative_to(ROOT / "results") for each in drawn)
    figures = (f"![{name}]({place})" for name, place in zip(names, places, strict=True))
    return "\n\n".join([table(_records(matrix)), *figures])


def _answered(command: str) -> str:
    """The command and what it prints; of a long answer the beginning and the end."""
    program, _, rest = command.partition(" ")
    lines = [line.rstrip() for line in _run(rest, program=program).strip("\n").splitlines()]
    if len(lines) > 25:
        lines = [*lines[:5], "…", *lines[-7:]]
    shown = " \\\n    ".join(_broken(f"$ python -m {command}", 74))
    lines = [part for line in lines for part in ([line] if "  " in line else _broken(line, 80))]
    return "```console\n" + "\n".join([shown, *lines]) + "\n```"


def _broken(line: str, width: int) -> list[str]:
    """Lines as on a terminal of so many columns, which break between words."""
    return textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False) or [""]


def _planned() -> str:
    """The planner's answer to each case: tokens per second with their range."""
    cases = [_rows(command) for command in _CASES.values()]
    labels = {name: registry.find(name).label for name in _PLANNED}
    rows = [
        (f"`{name}`" if label == name else label, *(_speed(case.get(name)) for case in cases))
        for name, label in labels.items()
    ]
    return text.table(("Tokens per second", *_CASES), rows)


def _rows(command: str) -> dict[str, dict[str, str]]:
    """The rows of a plan's table, by strategy."""
    with TemporaryDirectory() as folder:
        table = Path(folder) / "plan.csv"
        _run(command, "--strategies", ",".join(_PLANNED), "--csv", str(table))
        with table.open(encoding="utf-8", newline="") as file:
            return {row["strategy"]: row for row in csv.DictReader(file)}


def _run(command: str, *more: str, program: str = "experiments") -> str:
    arguments = [sys.executable, "-m", program, *shlex.split(command), *more]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _speed(row: dict[str, str] | None) -> str:
    if row is None:
        return "does not fit"
    names = ("tokens_per_s", "least_tokens_per_s", "most_tokens_per_s")
    speed, least, most = (float(f"{float(row[name]):.3g}") for name in names)
    return f"{speed:,.0f} ({least:,.0f}–{most:,.0f})"


def main(arguments: Sequence[str]) -> int:
    differs = False
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = rewritten(page, before)
        if "--check" not in arguments:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            print(f"{page} differs from the records: run python -m scripts.readme")
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
