"""Variants of one strategy as an ablation sees them: what each cell's cache did, and for what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.records.record import Cached, Record
from experiments.records.repeats import middle_half, within_spread

TIERS = ("device", "host", "disk")
PHASES = ("forward", "backward", "optimizer")

#: Subjects of cells, the first that is there, and what columns call each: ZeRO-3 as it ships, then
#: this library without its cache, then with its defaults.
REFERENCES: Mapping[str, str] = {
    "deepspeed-zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "fcdp none": "none",
    "fcdp": "FCDP",
}


def reference(subjects: Iterable[str]) -> str | None:
    """The subject that others are compared with; ``None`` where none of the usual ones is there."""
    there = set(subjects)
    return next((name for name in REFERENCES if name in there), None)


@dataclass(frozen=True)
class Variant:
    """One cell that ran, next to the reference of its comparison."""

    record: Record
    reference: Record | None

    @property
    def name(self) -> str:
        """What it chooses for its strategy; the strategy where that is the default alone."""
        cell = self.record.cell
        policy = getattr(cell.settings, "policy", None)
        words = [*([policy] if policy is not None else [cell.variant])]
        words += [choice for choice in cell.choices if choice != policy]
        return " ".join(words)

    @property
    def speed_up(self) -> float | None:
        """Over the reference; ``None`` without one."""
        own, other = self.record.tokens_per_s, self.reference and self.reference.tokens_per_s
        return own / other if own and other else None

    @property
    def differs(self) -> bool:
        """Whether it differs from the reference by more than the spread of their steps."""
        return self.reference is not None and not within_spread(self.record, self.reference)

    @property
    def step_seconds(self) -> tuple[float, float, float] | None:
        """First quartile, median and third quartile."""
        middle, median = middle_half(self.record), self.record.step_seconds_median
        return (middle[0], median, middle[1]) if middle and median is not None else None

    @property
    def cache(self) -> Cached | None:
        measured = self.record.measurement
        return None if measured is None else measured.cache

    def phase_seconds(self, phase: str) -> float | None:
        """Seconds a step, the mean over steps; ``None`` where the record does not say."""
        measured = self.record.measurement
        return ((measured and measured.phase_seconds) or {}).get(phase)

    def sent_bytes(self, *phases: str) -> float | None:
        """What a node sends to others in these phases of a step; ``None`` without a ledger."""
        measured = self.record.measurement
        if measured is None or measured.ledger_bytes_per_step is None:
            return None
        link = measured.ledger_bytes_per_step.get("inter_node", {})
        return sum(link.get(phase, 0.0) for phase in phases)

    def reached_bits_per_s(self, phase: str) -> float | None:
        """What a node sends to others in the phase over its time; reductions are in backward."""
        seconds = self.phase_seconds(phase)
        sent = self.sent_bytes(*(("backward", "reduce") if phase == "backward" else (phase,)))
        return 8 * sent / seconds if seconds and sent is not None else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPS utilisation, where a peak is known: in simulations, and on known GPUs."""
        measured = self.record.measurement
        if measured and measured.simulation:
            return measured.simulation.mfu
        from experiments.records.modelled import measured_mfu  # its numpy takes a while

        return measured_mfu(self.record)


def ranked(comparison: Sequence[Record]) -> list[Variant]:
    """The cells of one comparison that ran to their end, the fastest first."""
    ran = [record for record in comparison if record.measurement is not None]
    wanted = reference(record.cell.subject for record in ran)
    other = next((record for record in ran if record.cell.subject == wanted), None)
    ran.sort(key=lambda record: -(record.tokens_per_s or 0.0))
    return [Variant(record, other) for record in ran]
