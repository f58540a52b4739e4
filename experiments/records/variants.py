"""Variants of one strategy as an ablation sees them: what each cell's cache did, and for what."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.records.comparison import Comparison, reference
from experiments.records.record import Cached, Record

TIERS = ("device", "host", "disk")
PHASES = ("forward", "backward", "optimizer")


class Variant(Comparison):
    """One cell that ran, beside the reference of its comparison."""

    @property
    def name(self) -> str:
        """What it chooses for its strategy; the strategy where that is the default alone."""
        cell = self.of.cell
        policy = getattr(cell.settings, "policy", None)
        words = [*([policy] if policy is not None else [cell.variant])]
        words += [choice for choice in cell.choices if choice != policy]
        return " ".join(words)

    @property
    def cache(self) -> Cached | None:
        measured = self.of.measurement
        return None if measured is None else measured.cache

    def phase_seconds(self, phase: str) -> float | None:
        """Seconds a step, the mean over steps; ``None`` where the record does not say."""
        measured = self.of.measurement
        return ((measured and measured.phase_seconds) or {}).get(phase)

    def sent_bytes(self, *phases: str) -> float | None:
        """What a node sends to others in these phases of a step; ``None`` without a ledger."""
        measured = self.of.measurement
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
        measured = self.of.measurement
        if measured and measured.simulation:
            return measured.simulation.mfu
        from experiments.records.modelled import measured_mfu  # its numpy takes a while

        return measured_mfu(self.of)


def ranked(comparison: Sequence[Record]) -> list[Variant]:
    """The cells of one comparison that ran to their end, the fastest first."""
    ran = [record for record in comparison if record.measurement is not None]
    ran.sort(key=lambda record: -(record.tokens_per_s or 0.0))
    return [Variant(record, reference(comparison)) for record in ran]
