"""The committed runs: a folder of results for each matrix, and the studies beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import pandas as pd

from analysis import text
from analysis.load import fuyou, matrices, provenance
from analysis.load.rows import Quantity, Row, row, settings_of
from analysis.load.table import frame, latest
from experiments.records.cell import Cell
from experiments.records.record import Record, read
from experiments.records.select import FILE, PREDICTIONS
from simulation import bound
from simulation.bound import BoundRecord
from simulation.files import stored
from simulation.imitated import records as imitated
from simulation.imitated.records import MemoryRecord
from simulation.quantities import format_link

#: Where the records that are not of cells are, relative to the folder of results.
_STUDIES = {
    "memory": "memory/memory.jsonl",
    "bound": "bound/bound.jsonl",
    "fuyou-published": fuyou.FILE,
}

_Any = TypeVar("_Any", Record, MemoryRecord, BoundRecord)


@dataclass(frozen=True)
class _Held(Generic[_Any]):
    """Records that claims are compared with, in one file."""

    matrix: str
    #: Relative to the folder of results.
    file: str
    #: One a cell, a case or a point.
    records: list[_Any]

    @property
    def origin(self) -> list[tuple[str, str]]:
        """What made the records, each by its name."""
        commits = sorted({record.commit for record in self.records if record.commit})
        return [("Commit", ", ".join(commits) or "unknown")]

    @property
    def _days(self) -> str:
        """The days between which the records were written."""
        days = sorted(record.started_at[:10] for record in self.records)
        return f"{days[0]} to {days[-1]}."


@dataclass(frozen=True)
class Run(_Held[Record]):
    """The records of one matrix."""

    #: Predictions of the same cells, and the file of it if there is one; see
    #: ``python -m experiments validate``.
    predicted: str | None
    predictions: list[Record]

    @cached_property
    def rows(self) -> list[Row]:
        return [row(record) for record in self.records]

    @property
    def resources(self) -> str:
        """The cost of the run: cells, time, processors."""
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
        found = super().origin
        for column in ("versions", "hardware"):
            for item in provenance.distinct(self.table, column):
                words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in item.items())
                found.append((column.capitalize(), words))
        return found

    @cached_property
    def table(self) -> pd.DataFrame:
        return frame(self.records)


@dataclass(frozen=True)
class MemoryStudy(_Held[MemoryRecord]):
    """The study of memory at paper scale."""

    @property
    def rows(self) -> list[Row]:
        """One a case; what runs out of memory has a largest batch of none."""
        return [_memory_row(record) for record in self.records]

    @property
    def resources(self) -> str:
        minutes = sum(record.seconds for record in self.records) / 60
        return f"{len(self.records)} cases, {text.number(minutes, 2)} min"

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        case = self.records[0].case
        models = ", ".join(sorted({record.case.model.name for record in self.records}))
        how = ", ".join(sorted({f"{r.evidence} ({r.method})" for r in self.records}))
        return (
            f"One of {case.nodes} nodes × {case.ranks_per_node} ranks with "
            f"{case.device_bytes / 1e9:g} GB, {how} · {models} · {self._days}"
        )

    @property
    def origin(self) -> list[tuple[str, str]]:
        versions = {json.dumps(record.versions, sort_keys=True) for record in self.records}
        return super().origin + [
            ("Versions", ", ".join(f"{key} {value}" for key, value in json.loads(item).items()))
            for item in sorted(versions)
        ]


@dataclass(frozen=True)
class BoundStudy(_Held[BoundRecord]):
    """The bound of memory and bandwidth."""

    @property
    def rows(self) -> list[Row]:
        return [_bound_row(record) for record in self.records]

    @property
    def resources(self) -> str:
        return f"{len(self.records)} points"

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        models = ", ".join(dict.fromkeys(record.point.model for record in self.records))
        evidence = ", ".join(sorted({record.evidence for record in self.records}))
        return f"A closed form, {evidence} · {models} · {self._days}"


@dataclass(frozen=True)
class FuyouTable:
    """The table that Fuyou's authors published, predicted by its cost model."""

    matrix: str
    file: str
    points: list[fuyou.Point]

    @property
    def rows(self) -> list[Row]:
        """One a point; the one fitted constant is that of the points of one GPU."""
        adam = fuyou.fitted([point for point in self.points if point.gpus == 1])
        return [_fuyou_row(point, fuyou.predicted(point, adam)) for point in self.points]

    @property
    def resources(self) -> str:
        return f"{len(self.points)} points"

    @property
    def summary(self) -> str:
        return "The authors' published points, and the cost model that the strategy itself has"

    @property
    def origin(self) -> list[tuple[str, str]]:
        return [("Source", self.summary)]


#: Whatever claims are compared with.
AnyRun = Run | MemoryStudy | BoundStudy | FuyouTable


def load(results: Path, only: str | None = None) -> list[AnyRun]:
    """The committed runs of this repository's matrices, by name, and the studies; or ``only`` one.

    Raises ``ValueError`` if there are none or one holds a malformed record.
    """
    names = (*matrices.named(), *_STUDIES) if only is None else (only,)
    found = [run for name in names if (run := _of(results, name)) is not None]
    if not found:
        allowed = ", ".join(matrices.named())
        raise ValueError(f"{results}: no records of any matrix; there are {allowed}")
    return found


def _of(results: Path, name: str) -> AnyRun | None:
    """The run or study of this name; ``None`` where it has no records."""
    file = _file(results, _STUDIES.get(name, f"{name}/{FILE}"))
    if file is None:
        return None
    path = results / file
    if name == "memory":
        return MemoryStudy(name, file, of_memory(path))
    if name == "bound":
        return BoundStudy(name, file, bound.read(path))
    if name == "fuyou-published":
        return FuyouTable(name, file, fuyou.published(path))
    predicted = _file(results, f"{name}/{PREDICTIONS}")
    known = read(results / predicted) if predicted else []
    return Run(name, file, latest(read(path)), predicted, known)


def _file(results: Path, name: str) -> str | None:
    """The file of records of this name, compressed or not; ``None`` if there is none."""
    file = stored(results / name)
    return file.relative_to(results).as_posix() if file.exists() else None


def of_memory(file: Path) -> list[MemoryRecord]:
    """One record a case, the latest; raises ``ValueError`` for a malformed one."""
    by_age = sorted(imitated.read(file), key=lambda record: record.started_at)
    return list({record.case: record for record in by_age}.values())


def _memory_row(record: MemoryRecord) -> Row:
    case, finding = record.case, record.finding
    settings = settings_of(Cell.of_case(case)) | {"checkpointing": case.checkpointing}
    quantities: dict[Quantity, float] = {}
    if finding is not None:
        quantities["largest_micro_batch"] = finding.largest_micro_batch
        if finding.host_cache_bytes_per_node is not None:
            # In bfloat16, which is what is gathered.
            model = 2 * finding.parameters
            quantities["host_cache_share"] = finding.host_cache_bytes_per_node / model
    return Row(settings, record.state, record.evidence, quantities)


def _bound_row(record: BoundRecord) -> Row:
    point, gains = record.point, record.gains
    return Row(
        settings={
            "model": point.model,
            "link": format_link(point.bandwidth_bits_per_s),
            "gpus": point.gpus,
            "sequence_length": point.sequence_length,
        },
        state="ok",
        evidence=record.evidence,
        quantities={
            "hfu_bound": record.hfu_bound,
            "parameters_over_named": record.parameters / point.named_parameters,
            "gain_of_bandwidth": gains.twice_bandwidth,
            "gain_of_free_memory": gains.twice_free_memory,
            "gain_of_length": gains.longer_sequences,
            "gain_of_length_in_tokens": gains.longer_sequences_tokens_per_s,
        },
    )


def _fuyou_row(point: fuyou.Point, tflops: float) -> Row:
    settings = {
        "strategy": "fuyou",
        "model": point.model,
        "micro_batch": point.batch,
        "gpus": point.gpus,
        "ssds": point.ssds,
        "link": "unshaped",
    }
    return Row(settings, "ok", "simulated", {"tflops": tflops})
