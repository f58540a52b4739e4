"""Records as a table of one row per cell, whose columns are the schema's fields, flattened."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import pandas as pd

from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.comparison import pooled, spread
from experiments.records.record import Cached, Measurement, Record, read
from experiments.records.select import files

#: Settings of a cell that have a column; the strategy's own settings are in ``strategy``.
_SETTINGS = settings.names(Cell, "condition", "incidental")
#: Fields of a measurement that have a column: all but mappings, of which most are flattened.
_MEASURED = {
    name: field.annotation
    for name, field in Measurement.model_fields.items()
    if name
    not in ("ledger_bytes_per_step", "link_bytes_per_step", "cache", "phase_seconds", "simulation")
}


def _measured_kind(annotation: Any) -> str:
    if any(get_origin(kind) is list for kind in (annotation, *get_args(annotation))):
        return "object"
    kind = settings.column(annotation)
    return "float64" if kind == "Int64" else kind  # not every cell has a measurement


#: Columns of which only a built-in model has a value.
_SHAPE = {"family": "string", "layers": "Int64", "width": "Int64", "heads": "Int64"}
#: Every column that is always there, with its type; ``ledger_*``, ``cache_*`` and ``phase_*``
#: columns are added as found.
COLUMNS = {
    **dict.fromkeys(("matrix", "cell", "state", "error", "strategy"), "string"),
    # A link without a limit has none.
    **{name: settings.described(Cell)[name].kind for name in _SETTINGS},
    **_SHAPE,
    "evidence": "string",
    **{name: _measured_kind(annotation) for name, annotation in _MEASURED.items()},
    **{f"step_seconds_{name}": "float64" for name in ("median", "q1", "q3", "iqr")},
    "tokens_per_step": "Int64",
    "cores_per_node": "Int64",
    **dict.fromkeys(("tokens_per_s", "ledger_inter_node_bytes_per_step", "loss_final"), "float64"),
    # Open-ended mappings stay JSON text, so that the columns do not depend on the machine.
    **dict.fromkeys(("commit", "versions", "hardware", "network", "started_at"), "string"),
    "seconds": "float64",
}


def load(path: Path) -> list[Record]:
    return [record for records in by_file(path).values() for record in records]


def by_file(path: Path) -> dict[Path, list[Record]]:
    """Records of a file, or of each ``records.jsonl`` below a directory of runs.

    Raises ``ValueError`` if there is none, and for a malformed one.
    """
    records = {file: read(file) for file in files(path)}
    if not any(records.values()):
        raise ValueError(f"{path}: no records found")
    return records


def latest(records: Sequence[Record]) -> list[Record]:
    """One record per cell: where a cell was run again, the run that started last.

    A cell that a matrix repeats counts once, with the steps of all its repetitions.
    """
    by_age = sorted(records, key=lambda record: record.started_at)
    return pooled({(record.cell_id, record.evidence): record for record in by_age}.values())


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row per record, typed by ``COLUMNS``."""
    rows = [values(record) for record in records]
    extra = sorted({name for row in rows for name in row} - set(COLUMNS))
    table = pd.DataFrame(rows, columns=[*COLUMNS, *extra])
    # Text as objects: with any string type, pandas 2 and 3 do not agree on what is missing.
    kinds = {name: "object" if kind == "string" else kind for name, kind in COLUMNS.items()}
    typed: pd.DataFrame = table.astype({**kinds, **dict.fromkeys(extra, "float64")})
    return typed.copy()  # each column is a block of its own until then, which pandas warns of


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Write the table for other tools; the records stay the source."""
    texts = [name for name, kind in COLUMNS.items() if kind == "string"]
    table.astype(dict.fromkeys(texts, "string")).to_parquet(path, index=False)


def values(record: Record) -> dict[str, Any]:
    """One record's values by column; missing ones are left out, or ``None``."""
    cell = record.cell
    chosen = {
        **settings.values(cell, _SETTINGS),
        "cell": record.cell_id,
        "strategy": cell.subject,
        **{name: getattr(cell.model, name, None) for name in _SHAPE},
        "tokens_per_step": cell.tokens_per_step,
        "cores_per_node": record.cores_per_node,
    }
    plain = ("state", "error", "evidence", "commit", "started_at", "seconds")
    outcome = {name: getattr(record, name) for name in plain}
    for name in ("versions", "hardware", "network"):
        outcome[name] = json.dumps(getattr(record, name), sort_keys=True)
    if record.measurement is None:
        return {**chosen, **outcome}
    return {**chosen, **outcome, **_measured(record, record.measurement)}


def _measured(record: Record, measurement: Measurement) -> dict[str, Any]:
    """The columns that only a cell with a measurement has."""
    low, high = spread(record) or (math.nan, math.nan)
    return {
        **{name: getattr(measurement, name) for name in _MEASURED},
        "loss_final": measurement.losses[-1] if measurement.losses else None,
        **ledger(measurement.ledger_bytes_per_step),
        **_cache(measurement.cache),
        **{f"phase_{name}_seconds": n for name, n in (measurement.phase_seconds or {}).items()},
        # ``node_received_bytes_per_step``, ``server_sent_bytes_per_step`` and the like.
        **{
            f"{_identifier(name)}_bytes_per_step": count
            for name, count in (measurement.link_bytes_per_step or {}).items()
        },
        "step_seconds_median": record.step_seconds_median,
        "step_seconds_q1": low,
        "step_seconds_q3": high,
        "step_seconds_iqr": high - low,
        "tokens_per_s": record.tokens_per_s,
    }


def ledger(counted: dict[str, dict[str, float]] | None) -> dict[str, float]:
    """``ledger_<link>_bytes_per_step`` and, by phase, ``ledger_<link>_<phase>_bytes_per_step``."""
    columns: dict[str, float] = {}
    for link, phases in (counted or {}).items():
        name = f"ledger_{_identifier(link)}"
        columns[f"{name}_bytes_per_step"] = sum(phases.values())
        for phase, amount in phases.items():
            columns[f"{name}_{_identifier(phase)}_bytes_per_step"] = amount
    return columns


def _cache(cached: Cached | None) -> dict[str, float]:
    """``cache_hits``, ``cache_<tier>_entries``, ``cache_<tier>_bytes`` and the like."""
    if cached is None:
        return {}
    return {
        "cache_hits_per_step": cached.hits_per_step,
        "cache_misses_per_step": cached.misses_per_step,
        "cache_device_memory_bytes": cached.device_bytes,
        "cache_host_memory_bytes": cached.host_bytes,
        **{f"cache_{tier}_entries": count for tier, count in cached.entries.items()},
        **{f"cache_{tier}_entry_bytes": count for tier, count in cached.entry_bytes.items()},
    }


def _identifier(name: str) -> str:
    """A ledger key as part of a column name: ``inter-node`` and ``inter_node`` read the same."""
    return re.sub(r"\W+", "_", name.strip().lower())
