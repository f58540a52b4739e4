"""The bound of memory and bandwidth, as a run that claims are compared with and a page names."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.load.rows import Row
from simulation.bound import BoundRecord
from simulation.quantities import format_link


@dataclass(frozen=True)
class BoundStudy:
    """Its records, one a point."""

    matrix: str
    #: Relative to the folder of results.
    file: str
    records: list[BoundRecord]

    @property
    def rows(self) -> list[Row]:
        """What claims are compared with."""
        return [_row(record) for record in self.records]

    @property
    def resources(self) -> str:
        """What it took: its points."""
        return f"{len(self.records)} points"

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        models = ", ".join(dict.fromkeys(record.point.model for record in self.records))
        days = sorted(record.started_at[:10] for record in self.records)
        evidence = ", ".join(sorted({record.evidence for record in self.records}))
        return f"A closed form, {evidence} · {models} · {days[0]} to {days[-1]}."

    @property
    def origin(self) -> list[tuple[str, str]]:
        """The same in full: what, and its value."""
        commits = sorted({record.commit or "unknown" for record in self.records})
        return [("Commit", ", ".join(commits))]


def _row(record: BoundRecord) -> Row:
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
