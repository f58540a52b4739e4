"""W&B runs as they are to be written: one per cell, and one for the tables and figures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records.cell import Cell
from experiments.records.record import Measurement, Record
from simulation.quantities import format_link

_TAG_LENGTH = 64
#: Of the table of all cells.
_COLUMNS = (
    *("cell", "strategy", "model", "tuning", "link", "accumulation", "state", "evidence"),
    *("tokens_per_s", "step_seconds", "inter_node_megabytes_per_step"),
)
#: Titles of the charts, by the column that they show.
_CHARTS = {
    "tokens_per_s": "Tokens per second",
    "inter_node_megabytes_per_step": "MB between nodes per step",
}


@dataclass(frozen=True)
class WandbRun:
    """One W&B run that is to be written."""

    id: str
    name: str
    group: str
    job_type: str
    tags: list[str]
    config: dict[str, Any]
    fill: Callable[[Any], None]
    exit_code: int = 0


def cell_run(record: Record, run_id: str | None = None) -> WandbRun:
    """A cell's W&B run: its history, its summary; group = matrix, W&B's job type = strategy."""

    def fill(run: Any) -> None:
        if record.measurement is not None:
            for step, point in enumerate(_history(record.measurement), start=1):
                # With its number, a point that a resumed run has already is not added again.
                run.log(point, step=step)
        run.summary.update(_summary(record))

    return WandbRun(
        id=run_id or _run_id(record),
        name=record.cell_id,
        group=record.cell.matrix,
        job_type=record.cell.variant,
        tags=_tags(record),
        config=_config(record.cell),
        fill=fill,
        exit_code=0 if record.state == "ok" else 1,
    )


def report_run(records: Sequence[Record], directory: Path, report: Path) -> WandbRun:
    """The W&B run that shows all cells: a table, charts, the figures, and all files to download."""
    matrix = records[0].cell.matrix

    def fill(run: Any) -> None:
        import wandb

        _show(run, records, report)
        # A suite's matrix has a slash in its name, which an artifact's may not.
        artifact = wandb.Artifact(f"{matrix.replace('/', '-')}-report", type="report")
        with _staging(directory / "wandb" / "data"):
            artifact.add_file(str(directory / "records.jsonl"), skip_cache=True)
            for file in sorted(path for path in report.rglob("*") if path.is_file()):
                artifact.add_file(str(file), str(file.relative_to(report)), skip_cache=True)
            run.log_artifact(artifact)

    return WandbRun(
        id=_digest("report", *sorted(map(_run_id, records))),
        name=f"{matrix}-report",
        group=matrix,
        job_type="report",
        tags=sorted({record.evidence for record in records}),
        config={"matrix": matrix},
        fill=fill,
    )


def _show(run: Any, records: Sequence[Record], report: Path) -> None:
    """Log what is looked at in the browser: the cells as a table, two charts of it, the figures."""
    import wandb

    table = wandb.Table(columns=[*_COLUMNS], data=[_row(record) for record in records])
    shown: dict[str, Any] = {"cells": table}
    for name, title in _CHARTS.items():
        shown[f"charts/{name}"] = wandb.plot.bar(table, "cell", name, title=title)
    for figure in sorted(report.rglob("*.png")):
        shown[f"figures/{figure.stem}"] = wandb.Image(str(figure))
    run.log(shown)


def _row(record: Record) -> list[Any]:
    cell, measured = record.cell, record.measurement
    return [
        record.cell_id,
        cell.subject,
        cell.model.name,
        cell.tuning,
        format_link(cell.inter_bandwidth_bits_per_s),
        cell.accumulation,
        record.state,
        record.evidence,
        record.tokens_per_s,
        record.step_seconds_median,
        None if measured is None else measured.inter_node_bytes_per_step / 1e6,
    ]


def _config(cell: Cell) -> dict[str, Any]:
    """The cell's settings, none of which its strategy or its tuning does not have."""
    settings = cell.flat({"origin": True})
    if cell.tuning == "full":
        del settings["lora_rank"]
    return settings


@contextmanager
def _staging(directory: Path) -> Iterator[None]:
    """Have an artifact's files wait for `wandb sync` with the runs, unless the user says where."""
    given = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = given or str(directory.absolute())
    try:
        yield
    finally:
        if given is None:
            del os.environ["WANDB_DATA_DIR"]


def _run_id(record: Record) -> str:
    """An id, the same for the same record: a resumed matrix adds only its new cells."""
    return _digest(record.cell_id, record.started_at)


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def _tags(record: Record) -> list[str]:
    cluster = record.cell.cluster
    shape = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks"
    cell = record.cell
    link = format_link(cell.inter_bandwidth_bits_per_s)
    tags = [cell.variant, cell.model.name, cell.tuning, link, record.evidence, cluster.kind, shape]
    tags.append(str(record.hardware.get("cpu", "")))
    return list(dict.fromkeys(tag[:_TAG_LENGTH] for tag in tags if tag))


def _history(measurement: Measurement) -> list[dict[str, float]]:
    """One point per step, whose number is W&B's; warm-up steps, the first, have no time."""
    warmup = len(measurement.losses) - len(measurement.step_seconds)
    points = []
    for step, loss in enumerate(measurement.losses):
        point = {"loss": loss}
        if step >= warmup:
            point["step_seconds"] = measurement.step_seconds[step - warmup]
        points.append(point)
    return points


def _summary(record: Record) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "state": record.state,
        "evidence": record.evidence,
        "error": record.error,
        "seconds": record.seconds,
        "commit": record.commit,
        "tokens_per_s": record.tokens_per_s,
        "step_seconds_median": record.step_seconds_median,
    }
    figures |= {f"versions/{name}": version for name, version in record.versions.items()}
    figures |= {f"hardware/{name}": value for name, value in record.hardware.items()}
    figures |= {f"network/{name}": value for name, value in record.network.items()}
    if record.measurement is not None:
        figures |= record.measurement.model_dump(exclude={"losses", "step_seconds"})
    return {name: value for name, value in figures.items() if value is not None}
