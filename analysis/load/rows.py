"""Rows: a cell's settings and quantities as claims use them, from any kind of record."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Any

from pydantic import AfterValidator

from analysis.load.table import values
from experiments.records import settings
from experiments.records.abilities import Evidence
from experiments.records.cell import Cell
from experiments.records.parity import promised
from experiments.records.record import METRICS, Record, State
from simulation.hardware import gpu
from simulation.quantities import format_link

#: A record's values by column of the table.
_Columns = Mapping[str, Any]
#: Quantities of records that are of no cell, and those of simulations alone. The bound of memory
#: and bandwidth has itself, and the factors that it gains from a change of one input.
_OTHERS = (
    "largest_micro_batch",
    "hfu_bound",
    "parameters_over_named",
    "gain_of_bandwidth",
    "gain_of_free_memory",
    "gain_of_length",
    "gain_of_length_in_tokens",
    "tflops",
    "mfu",
    "idle_share",
    "unhidden_share",
    "over_ideal",
)


def _known_quantity(value: str) -> str:
    names = (*_QUANTITIES, *_OTHERS)
    if value not in names:
        raise ValueError(f"{value!r} is no quantity; allowed are {', '.join(names)}")
    return value


Quantity = Annotated[str, AfterValidator(_known_quantity)]


@dataclass(frozen=True)
class Row:
    """One cell: its settings, how it ended, and its quantities in basic units."""

    #: All settings that decide what a step does, by their names in a selection.
    settings: Mapping[str, object]
    state: State
    evidence: Evidence
    #: Shares and bytes; quantities that the cell does not have are left out.
    quantities: Mapping[Quantity, float] = field(default_factory=dict)
    #: Losses of each step that it was to train, NaN where one is missing; none if simulated.
    losses: Sequence[float] = ()
    #: The cell's record, if there is one.
    record: Record | None = None


def row(record: Record) -> Row:
    """The row of a cell's record, from a real, emulated or simulated cluster."""
    chosen = settings_of(record.cell)
    if record.measurement is None:
        return Row(chosen, record.state, record.evidence)
    columns = values(record)
    quantities = {name: n for name, of in _QUANTITIES.items() if (n := of(columns)) is not None}
    return Row(
        chosen,
        record.state,
        record.evidence,
        quantities | _simulated(record),
        promised(record) if record.evidence != "simulated" else (),
        record,
    )


def settings_of(cell: Cell) -> dict[str, object]:
    """All settings that decide what the cell's step does; the link as tables write it.

    A setting that the strategy does not have is at its default, to be compared with others.
    """
    known = settings.described(Cell)
    chosen = settings.values(cell, settings.names(Cell, "condition", "subject"))
    chosen = {k: known[k].default if v is None else v for k, v in chosen.items()}
    return chosen | {"link": format_link(chosen.pop("inter_bandwidth_bits_per_s"))}


def _ledger(columns: _Columns, *phases: str) -> float | None:
    """Bytes that a node sends to others in these phases; ``None`` without a ledger."""
    if "ledger_inter_node_bytes_per_step" not in columns:
        return None
    sent = (columns.get(f"ledger_inter_node_{name}_bytes_per_step", 0.0) for name in phases)
    return float(sum(sent))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


#: Bytes of an element in the type that is gathered.
_WIDTH = {"float32": 4, "bfloat16": 2}


def _activation_bytes(columns: _Columns, of: Callable[[list[float]], float]) -> float | None:
    """The least, or the most, bytes of activations in a slot; ``None`` without slots."""
    slots = columns["activation_bytes_by_slot"]
    return of(slots) if slots else None


def _per_parameter(link: str) -> Callable[[_Columns], float | None]:
    """Bytes of a link per parameter of the model."""
    return lambda c: _over(c.get(f"{link}_bytes_per_step"), c["parameters"])


#: Bytes are those that leave the busiest node in a step, by the kernel's counters or the simulator;
#: those of gathers and phases are from the strategy's ledger. The nodes of a cluster send alike, so
#: that each sends as much as the busiest. Cyclic strategies: the slot that sends most over all
#: trained parameters, in float32; activations of the fullest slot over those of all micro-batches
#: at once, and over the emptiest slot. Strategies with a server: bytes of a node's link and of the
#: server's, by direction, per parameter. The metrics of records are quantities too.
_QUANTITIES: dict[Quantity, Callable[[_Columns], float | None]] = {
    "tokens_per_s": lambda c: c["tokens_per_s"],
    "inter_node_bytes": lambda c: c["inter_node_bytes_per_step"],
    "inter_node_bytes_over_least": lambda c: _over(
        c["inter_node_bytes_per_step"], c["inter_node_bytes_closed_form"]
    ),
    "all_nodes_bytes": lambda c: c["inter_node_bytes_per_step"] * c["nodes"],
    "gather_bytes": lambda c: _ledger(c, "forward", "backward"),
    "backward_gather_bytes": lambda c: _ledger(c, "backward"),
    "all_nodes_forward_bytes": lambda c: _times(_ledger(c, "forward"), c["nodes"]),
    "all_nodes_backward_bytes": lambda c: _times(_ledger(c, "backward", "reduce"), c["nodes"]),
    "peak_device_bytes": lambda c: c["peak_device_bytes"],
    "host_cache_share": lambda c: _over(
        _times(c["host_cache_bytes"], c["ranks_per_node"]), c["parameters"] * _WIDTH[c["dtype"]]
    ),
    "largest_slot_share": lambda c: _over(
        max(c["bytes_by_slot"] or (), default=None), 4 * c["trainable_parameters"]
    ),
    "activation_share": lambda c: _over(_activation_bytes(c, max), c["activation_bytes_together"]),
    "activation_spread": lambda c: _over(_activation_bytes(c, max), _activation_bytes(c, min)),
    "held_out_perplexity": lambda c: None if (e := c["held_out_loss"]) is None else math.exp(e),
    "node_received_per_parameter": _per_parameter("node_received"),
    "node_sent_per_parameter": _per_parameter("node_sent"),
    "server_received_per_parameter": _per_parameter("server_received"),
    "server_sent_per_parameter": _per_parameter("server_sent"),
    "tokens_per_s_per_gpu": lambda c: c["tokens_per_s"] / (c["nodes"] * c["ranks_per_node"]),
    **{name: itemgetter(name) for name in METRICS},
}


def _simulated(record: Record) -> dict[Quantity, float]:
    """Quantities that only a simulated step has."""
    cluster, measured = record.cell.cluster, record.measurement
    if cluster.kind != "simulated" or measured is None or measured.simulation is None:
        return {}
    simulation = measured.simulation
    peak = gpu(cluster.gpu).peak_flops * cluster.nodes * cluster.ranks_per_node
    quantities: dict[Quantity, float] = {
        "mfu": simulation.mfu,
        "tflops": simulation.mfu * peak / 1e12,
        "idle_share": 1 - simulation.busy["compute"],
        "over_ideal": 1 / max(simulation.busy.values()) - 1,
    }
    if on_link := simulation.busy.get("inter_node"):
        streams = ("gather across", "gather", "reduce")
        waited = sum(simulation.critical_seconds.get(stream, 0.0) for stream in streams)
        seconds = on_link * statistics.median(measured.step_seconds)
        quantities["unhidden_share"] = waited / seconds
    return quantities
