"""The committed runs: a folder of results for each matrix, and the studies beside them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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

#: Files of records that are not of cells, relative to the folder of results.
MEMORY = "memory/memory.jsonl"
BOUND = "bound/bound.jsonl"


@dataclass(frozen=True)
class Run:
    """The records of one matrix."""

    matrix: str
    #: The file of its records, relative to the folder of results.
    file: str
    #: One per cell.
    records: list[Record]
    #: The file of the cells' predictions, if there is one, and the predictions; see
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
        cores = sorted({record.hardware["cores"] for record in ran if "cores" in record.hardware})
        parts = [f"{len(ran)} cells", _minutes(ran), *(f"{count} cores" for count in cores)]
        return ", ".join(parts)

    @property
    def summary(self) -> str:
        """The provenance of the records, in a sentence."""
        return provenance.provenance(self.table)

    @property
    def origin(self) -> list[tuple[str, str]]:
        """Commit, versions and hardware that made the records, each by its name."""
        origin = [_commit(self.records)]
        for column in ("versions", "hardware"):
            for item in provenance.distinct(self.table, column):
                words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in item.items())
                origin.append((column.capitalize(), words))
        return origin

    @cached_property
    def table(self) -> pd.DataFrame:
        return frame(self.records)


@dataclass(frozen=True)
class Study:
    """Results for claims from a study that is not a matrix; its fields are those of ``Run``."""

    matrix: str
    file: str
    records: Sequence[MemoryRecord] | Sequence[BoundRecord] | Sequence[fuyou.Point]
    rows: list[Row]
    resources: str
    summary: str
    origin: list[tuple[str, str]]


def of_memory(file: str, records: Sequence[MemoryRecord]) -> Study:
    """The study of memory at paper scale: one record per case, the latest."""
    by_age = sorted(records, key=lambda record: record.started_at)
    records = [*{record.case: record for record in by_age}.values()]
    case = records[0].case
    models = ", ".join(sorted({record.case.model.name for record in records}))
    how = ", ".join(sorted({f"{r.evidence} ({r.method})" for r in records}))
    versions = {json.dumps(record.versions, sort_keys=True) for record in records}
    return Study(
        "memory",
        file,
        records,
        [_memory_row(record) for record in records],
        f"{len(records)} cases, {_minutes(records)}",
        f"One of {case.nodes} nodes × {case.ranks_per_node} ranks with "
        f"{case.device_bytes / 1e9:g} GB, {how} · {models} · {_days(records)}",
        [_commit(records)]
        + [
            ("Versions", ", ".join(f"{key} {value}" for key, value in json.loads(item).items()))
            for item in sorted(versions)
        ],
    )


def _of_bound(file: str, records: Sequence[BoundRecord]) -> Study:
    models = ", ".join(dict.fromkeys(record.point.model for record in records))
    evidence = ", ".join(sorted({record.evidence for record in records}))
    return Study(
        "bound",
        file,
        records,
        [_bound_row(record) for record in records],
        f"{len(records)} points",
        f"A closed form, {evidence} · {models} · {_days(records)}",
        [_commit(records)],
    )


def _of_fuyou(points: Sequence[fuyou.Point]) -> Study:
    """The table that Fuyou's authors published, predicted by its cost model.

    Its one fitted constant is fitted to the points of one GPU.
    """
    adam = fuyou.fitted([point for point in points if point.gpus == 1])
    rows = [_fuyou_row(point, fuyou.predicted(point, adam)) for point in points]
    source = "The authors' published points, and the cost model that the strategy itself has"
    size = f"{len(points)} points"
    return Study("fuyou-published", fuyou.FILE, points, rows, size, source, [("Source", source)])


def _commit(records: Sequence[Record | MemoryRecord | BoundRecord]) -> tuple[str, str]:
    commits = sorted({record.commit for record in records if record.commit})
    return "Commit", ", ".join(commits) or "unknown"


def _days(records: Sequence[MemoryRecord | BoundRecord]) -> str:
    """The days between which the records were written."""
    days = sorted(record.started_at[:10] for record in records)
    return f"{days[0]} to {days[-1]}."


def _minutes(records: Sequence[Record | MemoryRecord]) -> str:
    return f"{text.number(sum(record.seconds for record in records) / 60, 2)} min"


#: Anything that claims are compared with.
AnyRun = Run | Study


def load(results: Path, only: str | None = None) -> list[AnyRun]:
    """The committed runs of this repository's matrices, by name, and the studies; or ``only`` one.

    Raises ``ValueError`` if there are none or one holds a malformed record.
    """
    runs: list[AnyRun] = []
    for name in [*matrices.named()] if only is None else [only]:
        if file := _file(results, f"{name}/{FILE}"):
            predicted = _file(results, f"{name}/{PREDICTIONS}")
            known = read(results / predicted) if predicted else []
            runs.append(Run(name, file, latest(read(results / file)), predicted, known))
    if only is None:
        if (file := _file(results, MEMORY)) and (cases := imitated.read(results / file)):
            runs.append(of_memory(file, cases))
        if (file := _file(results, BOUND)) and (points := bound.read(results / file)):
            runs.append(_of_bound(file, points))
        if (results / fuyou.FILE).exists():
            runs.append(_of_fuyou(fuyou.published(results / fuyou.FILE)))
    if not runs:
        allowed = ", ".join(matrices.named())
        raise ValueError(f"{results}: no records of any matrix; there are {allowed}")
    return runs


def _file(results: Path, name: str) -> str | None:
    """The file of records of this name, compressed or not; ``None`` if there is none."""
    file = stored(results / name)
    return file.relative_to(results).as_posix() if file.exists() else None


def _memory_row(record: MemoryRecord) -> Row:
    case, finding = record.case, record.finding
    settings = settings_of(Cell.of_case(case)) | {"checkpointing": case.checkpointing}
    quantities: dict[Quantity, float] = {}
    if finding is not None:
        quantities["largest_micro_batch"] = finding.largest_micro_batch
        if finding.host_cache_bytes_per_node is not None:
            # Parameters are gathered in bfloat16.
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
