"""The committed runs: a folder of results for each matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis import text
from analysis.load import matrices, memory, provenance
from analysis.load.bound import BoundStudy
from analysis.load.memory import MemoryStudy
from analysis.load.rows import Row, row
from analysis.load.table import frame, latest
from experiments.records.record import Record, read
from simulation import bound

#: Where the records that are not of cells are, relative to the folder of results.
MEMORY = "memory/memory.jsonl"
BOUND = "bound/bound.jsonl"


@dataclass(frozen=True)
class Run:
    """The records of one matrix, one a cell."""

    matrix: str
    #: Relative to the folder of results.
    file: str
    records: list[Record]
    #: What the simulator says of the same cells; see ``python -m experiments validate``.
    predictions: list[Record]

    @cached_property
    def rows(self) -> list[Row]:
        """What claims are compared with."""
        return [row(record) for record in self.records]

    @property
    def resources(self) -> str:
        """What the run took: cells, time, processors."""
        ran = [record for record in self.records if record.state != "skipped"]
        minutes = sum(record.seconds for record in ran) / 60
        cores = sorted({record.hardware["cores"] for record in ran if "cores" in record.hardware})
        parts = [f"{len(ran)} cells", f"{text.number(minutes, 2)} min"]
        return ", ".join(parts + [f"{count} cores" for count in cores])

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        return provenance.provenance(self.table)

    @property
    def origin(self) -> list[tuple[str, str]]:
        """The same in full: what, and its value."""
        commits = ", ".join(provenance.commits(self.table)) or "unknown"
        found = [("Commit", commits)]
        for column in ("versions", "hardware"):
            for item in provenance.distinct(self.table, column):
                words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in item.items())
                found.append((column.capitalize(), words))
        return found

    @cached_property
    def table(self) -> pd.DataFrame:
        """Its records, one row a cell."""
        return frame(self.records)


#: Whatever claims are compared with.
AnyRun = Run | MemoryStudy | BoundStudy


def load(results: Path) -> list[AnyRun]:
    """The committed runs of this repository's matrices, by name, and the studies.

    Raises ``ValueError`` if there are none or one holds a malformed record.
    """
    names = ((name, f"{name}/records.jsonl") for name in matrices.named())
    found: list[AnyRun] = [
        Run(name, file, latest(read(results / file)), _predictions(results / name))
        for name, file in names
        if (results / file).exists()
    ]
    if (results / MEMORY).exists():
        found.append(MemoryStudy("memory", MEMORY, memory.load(results / MEMORY)))
    if (results / BOUND).exists():
        found.append(BoundStudy("bound", BOUND, bound.read(results / BOUND)))
    if not found:
        allowed = ", ".join(matrices.named())
        raise ValueError(f"{results}: no records of any matrix; there are {allowed}")
    return found


def _predictions(folder: Path) -> list[Record]:
    file = folder / "predicted.jsonl"
    return read(file) if file.exists() else []
