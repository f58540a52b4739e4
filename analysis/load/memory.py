"""The study of memory at paper scale, as a run that claims are compared with and a page shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from analysis import text
from analysis.load.rows import Quantity, Row, settings_of
from experiments.records.cell import Cell
from simulation.imitated.records import MemoryRecord, read


@dataclass(frozen=True)
class MemoryStudy:
    """Its records, one a case."""

    matrix: str
    #: Relative to the folder of results.
    file: str
    records: list[MemoryRecord]

    @property
    def rows(self) -> list[Row]:
        """What claims are compared with; what runs out of memory has a largest batch of none."""
        return [_row(record) for record in self.records]

    @property
    def resources(self) -> str:
        """What the study took: cases, time of all processes."""
        minutes = sum(record.seconds for record in self.records) / 60
        return f"{len(self.records)} cases, {text.number(minutes, 2)} min"

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        case, days = self.records[0].case, sorted(r.started_at[:10] for r in self.records)
        models = ", ".join(sorted({record.case.model.name for record in self.records}))
        how = ", ".join(sorted({f"{r.evidence} ({r.method})" for r in self.records}))
        return (
            f"One of {case.nodes} nodes × {case.ranks_per_node} ranks with "
            f"{case.device_bytes / 1e9:g} GB, {how} · {models} · {days[0]} to {days[-1]}."
        )

    @property
    def origin(self) -> list[tuple[str, str]]:
        """The same in full: what, and its value."""
        commits = sorted({record.commit or "unknown" for record in self.records})
        versions = {json.dumps(record.versions, sort_keys=True) for record in self.records}
        return [("Commit", ", ".join(commits))] + [
            ("Versions", ", ".join(f"{key} {value}" for key, value in json.loads(item).items()))
            for item in sorted(versions)
        ]


def load(file: Path) -> list[MemoryRecord]:
    """One record a case, the latest; raises ``ValueError`` for a malformed one."""
    latest = {r.case: r for r in sorted(read(file), key=lambda record: record.started_at)}
    return list(latest.values())


def _row(record: MemoryRecord) -> Row:
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
