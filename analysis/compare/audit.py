"""Audit of each cell's bytes and losses, which show whether a strategy did its work.

A baseline that sends less than its schedule must has not resharded its parameters. One that sends
more uses a wasteful backend, which is a problem unless it is known why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis import text
from baselines import registry
from experiments.records import modelled, parity
from experiments.records.allowed import why_not_simulated
from experiments.records.cell import Cell
from experiments.records.parity import REFERENCE
from experiments.records.record import Measurement, Record
from simulation import framing
from simulation.framing import MESSAGE_BYTES


@dataclass(frozen=True)
class Allowance:
    """The multiple of its closed form that an engine may send over gloo, and the reason."""

    factor: float
    why: str
    #: It may send less, down to this share, if there is a reason.
    least: float = 0.98
    why_less: str = ""


_EXACT = Allowance(1.0, "")
_GLOO = Allowance(
    3.0,
    "Over 2 × 2 ranks gloo's gathers send 1.5 times the least (a ring over all ranks crosses each "
    "node's link with 3/4 of a buffer, a hierarchy with 1/2), its reduce-scatters 3 times (each "
    "is an all-reduce over that ring)",
)
_RING = Allowance(1.5, "Gloo's all-reduce is one ring over all ranks, not one inside each node")
_LIVE_PARAMETERS = (
    "DeepSpeed does not gather again in backward what it still holds from the end of forward, more "
    "than a block: of a model of two blocks that is a large share, in its favour"
)
#: By engine; all others, and strategies that exchange in pairs, are held to the least.
_ALLOWANCES = {
    "fsdp2": _GLOO,
    "deepspeed": replace(_GLOO, least=0.9, why_less=_LIVE_PARAMETERS),
    "ddp": _RING,
    "co2": _RING,
}
_MESSAGES = (
    f"Headers of small messages: up to {MESSAGE_BYTES} bytes for each, which is a large "
    "share where little else is sent"
)
_WHOLE = (
    "After each step DeepSpeed gathers one by one all parameters that it keeps whole, vectors and "
    "adapters, frozen ones too: the headers of so many small messages, up to "
    f"{MESSAGE_BYTES} bytes for each, are a large share where little else is sent"
)
#: Ratio to the closed form up to which no explanation is needed.
_NEAR = 1.05


@dataclass(frozen=True)
class Finding:
    """The audit of one cell."""

    cell: Cell
    #: Bytes per step, and the closed form of them; ``None`` where it did not run.
    sent: float | None
    least: float | None
    #: The largest relative difference of a step's loss from the reference's; ``None`` without one.
    loss_difference: float | None
    problems: tuple[str, ...]
    #: The reasons why it sends more or less than the least.
    explanations: tuple[str, ...]

    @property
    def factor(self) -> float | None:
        return self.sent / self.least if self.sent is not None and self.least else None


def audit(records: Sequence[Record]) -> list[Finding]:
    """One finding for each cell that was to run, in the order of the records.

    Raises ``ValueError`` where all records are simulated.
    """
    findings = []
    for of in parity.compare(records):
        cell, measured = of.record.cell, of.record.measurement
        if measured is None:
            findings.append(Finding(cell, None, None, None, of.problems, ()))
            continue
        problems, explanations = _judge_bytes(cell, measured)
        sent, least = measured.inter_node_bytes_per_step, measured.inter_node_bytes_closed_form
        problems += of.problems
        findings.append(Finding(cell, sent, least, of.difference, problems, explanations))
    return findings


def markdown(findings: Sequence[Finding]) -> str:
    """A table of the findings, and the reasons that it refers to."""
    numbers = ("Micro-batches", "MB a step", "least MB", "factor", f"loss from {REFERENCE}'s")
    reasons: dict[str, int] = {}
    rows = []
    for finding in findings:
        notes = [f" [{reasons.setdefault(why, len(reasons) + 1)}]" for why in finding.explanations]
        row = (
            finding.cell.variant,
            finding.cell.tuning,
            str(finding.cell.accumulation),
            text.megabytes(finding.sent),
            text.megabytes(finding.least),
            text.times(finding.factor) + "".join(notes),
            text.number(finding.loss_difference, 2),
            text.escaped("; ".join(finding.problems)) or "fair",
        )
        rows.append(row)
    words = ("Strategy", "Tuning", "verdict")
    shown = text.table((*words[:2], *numbers, words[2]), rows, words)
    below = [f"[{index}] {reason}." for reason, index in reasons.items()]
    return "\n".join([shown, "", *below]) + "\n"


def _judge_bytes(cell: Cell, measured: Measurement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems of the bytes that it sends, and explanations of those beyond the least."""
    sent, least = measured.inter_node_bytes_per_step, measured.inter_node_bytes_closed_form
    schedule = registry.find(cell.strategy).schedule
    pairwise = schedule is not None and schedule.pairwise
    allowance = _EXACT if pairwise else _ALLOWANCES.get(measured.engine, _EXACT)
    if least is None:
        return (), ()
    if sent < allowance.least * least:
        return ("sends less than its schedule must",), ()
    if reason := why_not_simulated(cell):
        return (), (
            f"What it sends beyond the least was not judged, as {cell.model.name} {reason}",
        )
    framed = modelled.framed(cell)
    payload = allowance.factor * (least + framing.whole_bytes(*framed))
    if sent > payload + framing.framing_bytes(*framed, payload):
        return ("sends more than is explained",), ()
    if sent < _EXACT.least * least:
        return (), (allowance.why_less,)
    if sent <= _NEAR * least:
        return (), ()
    explanations = []
    if sent > least + framing.framing_bytes(*framed, least):
        explanations.append(allowance.why)
    if sent > _NEAR * allowance.factor * least or not explanations:
        explanations.append(_WHOLE if measured.engine == "deepspeed" else _MESSAGES)
    return (), tuple(explanations)
