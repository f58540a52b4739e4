"""What a claim may ask of one cell, whichever kind of record it stands in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from analysis import text
from experiments import settings
from experiments.parity import promised
from experiments.records import Cell, Evidence, Measurement, Record, State

#: Bytes are those of a step. The first line's leave the busiest node, by the kernel's counters or
#: the simulator; the second line's are the strategy's own count, its ledger. The last two lines'
#: are of the bound of memory and bandwidth: itself, and what changing one thing multiplies it by.
Quantity = Literal[
    "tokens_per_s", "inter_node_bytes", "inter_node_bytes_over_least", "all_nodes_bytes",
    "gather_bytes", "backward_gather_bytes", "all_nodes_forward_bytes", "all_nodes_backward_bytes",
    "peak_device_bytes", "host_cache_share", "largest_micro_batch",
    "hfu_bound", "parameters_over_named", "gain_of_bandwidth", "gain_of_free_memory",
    "gain_of_length", "gain_of_length_in_tokens",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One cell: its settings, how it ended, and its quantities in basic units."""

    #: Everything that decides what a step is, by the names that a selection has.
    settings: Mapping[str, object]
    state: State
    evidence: Evidence
    #: Shares and bytes; what a cell does not have is not in it.
    quantities: Mapping[Quantity, float] = field(default_factory=dict)
    #: Of each step that it was to train, NaN where one is missing; none of a simulated cell.
    losses: Sequence[float] = ()


def row(record: Record) -> Row:
    """A cell that ran on a cluster, real, emulated or simulated."""
    chosen, measured = settings_of(record.cell), record.measurement
    if measured is None:
        return Row(chosen, record.state, record.evidence)
    values = {name: of(record.cell, measured) for name, of in _QUANTITIES.items()}
    values["tokens_per_s"] = record.tokens_per_s
    return Row(
        chosen,
        record.state,
        record.evidence,
        {name: value for name, value in values.items() if value is not None},
        () if record.evidence == "simulated" else promised(record),
    )


def settings_of(cell: Cell) -> dict[str, object]:
    """All that decides what the cell's step is; the link as tables write it."""
    found = settings.values(cell, settings.names(Cell, "condition", "subject"))
    return found | {"link": text.link(found.pop("inter_bandwidth_bits_per_s"))}


def _ledger(measured: Measurement, *phases: str) -> float | None:
    """Bytes that a node sends to others in these phases; ``None`` without a ledger."""
    ledger = measured.ledger_bytes_per_step
    if ledger is None or "inter_node" not in ledger:
        return None
    return sum(ledger["inter_node"].get(phase, 0.0) for phase in phases)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _gathered_model_bytes(cell: Cell, measured: Measurement) -> float:
    """W parameters in the type that is gathered."""
    return measured.parameters * {"float32": 4, "bfloat16": 2}[cell.dtype]


# The nodes of a cluster send alike, so that all of them send the busiest one's bytes.
_QUANTITIES: dict[Quantity, Callable[[Cell, Measurement], float | None]] = {
    "inter_node_bytes": lambda c, m: m.inter_node_bytes_per_step,
    "inter_node_bytes_over_least": lambda c, m: _over(
        m.inter_node_bytes_per_step, m.inter_node_bytes_closed_form
    ),
    "all_nodes_bytes": lambda c, m: m.inter_node_bytes_per_step * c.cluster.nodes,
    "gather_bytes": lambda c, m: _ledger(m, "forward", "backward"),
    "backward_gather_bytes": lambda c, m: _ledger(m, "backward"),
    "all_nodes_forward_bytes": lambda c, m: _times(_ledger(m, "forward"), c.cluster.nodes),
    "all_nodes_backward_bytes": lambda c, m: _times(
        _ledger(m, "backward", "reduce"), c.cluster.nodes
    ),
    "peak_device_bytes": lambda c, m: m.peak_device_bytes,
    "host_cache_share": lambda c, m: _over(
        _times(m.host_cache_bytes, c.cluster.ranks_per_node), _gathered_model_bytes(c, m)
    ),
}
