"""Audit of each cell's bytes and losses, which show whether a strategy did its work.

A baseline that sends less than its schedule must has not resharded its parameters. One that sends
more than its transport needs, headers included, has done something that nobody knows of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis import text
from baselines.encoding import DIFFERENCES
from experiments.records import modelled, parity
from experiments.records.allowed import why_not_simulated
from experiments.records.cell import Cell
from experiments.records.parity import REFERENCE
from experiments.records.record import Measurement, Record
from simulation import framing
from simulation.framing import GLOO_MESSAGE_BYTES
from simulation.prediction import predict

_TOO_LITTLE = "sends less than its schedule must"
#: Share of the payload below which a strategy has left something out. DeepSpeed may send less.
_LEAST, _LEAST_OF_DEEPSPEED = 0.98, 0.9
#: Ratio of bytes beyond which an explanation is needed.
_NEAR = 1.05
_RING = "Gloo's all-reduce is one ring over all ranks, not one inside each node"
_GLOO = (
    "Over 2 × 2 ranks gloo's gathers send 1.5 times the least (a ring over all ranks crosses each "
    "node's link with 3/4 of a buffer, a hierarchy with 1/2), its reduce-scatters 3 times (each "
    "is an all-reduce over that ring)"
)
#: CO2's older records are of such a ring, the simulator and newer ones of exchanges in pairs.
_RING_OF_CO2 = 1.5
_LIVE_PARAMETERS = (
    "DeepSpeed does not gather again in backward what it still holds from the end of forward, more "
    "than a block: of a model of two blocks that is a large share, in its favour"
)
_DIFFERENCES = (
    "Bytes of differences depend on how far an optimizer step goes, and have no closed form"
)
#: By engine: why it sends more than its closed form. Of the others all-reduces are gloo's.
_TRANSPORTS = {"fsdp2": _GLOO, "deepspeed": _GLOO, "fcdp": _DIFFERENCES}
_MESSAGES = (
    f"Headers of small messages: some {GLOO_MESSAGE_BYTES} bytes for each, which is a large share "
    "where little else is sent"
)
_WHOLE = (
    "After each step DeepSpeed gathers one by one all parameters that it keeps whole, vectors and "
    f"adapters, frozen ones too: the headers of so many small messages, some {GLOO_MESSAGE_BYTES} "
    "bytes for each, are a large share where little else is sent"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The audit of one cell."""

    cell: Cell
    #: Bytes per step, and the closed form of them; ``None`` where it did not run.
    sent: float | None = None
    least: float | None = None
    #: The payload of the schedule over its transport, with headers and acknowledgements; ``None``
    #: where the cell is not simulated.
    expected: float | None = None
    #: The largest relative difference of a step's loss from the reference's; ``None`` without one.
    loss_difference: float | None = None
    problems: tuple[str, ...]
    #: The reasons why it sends more or less than the least.
    explanations: tuple[str, ...] = ()
    #: Whether its bytes have a closed form to compare them with.
    judged: bool = True

    @property
    def verdict(self) -> str:
        not_judged = () if self.judged else ("bytes not judged",)
        return "; ".join([*self.problems, *not_judged]) or "fair"

    @property
    def factor(self) -> float | None:
        return self.sent / self.least if self.sent is not None and self.least else None

    @property
    def of_expected(self) -> float | None:
        """Bytes per step over those that its transport and their headers explain."""
        return self.sent / self.expected if self.sent is not None and self.expected else None


def audit(records: Sequence[Record]) -> list[Finding]:
    """One finding for each cell that was to run, in the order of the records.

    Raises ``ValueError`` where all records are simulated.
    """
    findings = []
    for of in parity.compare(records):
        cell, measured = of.record.cell, of.record.measurement
        if measured is None:
            findings.append(Finding(cell=cell, problems=of.problems))
            continue
        judged = _judge_bytes(of.record, measured)
        found = Finding(
            cell=cell,
            sent=measured.inter_node_bytes_per_step,
            least=measured.inter_node_bytes_closed_form,
            expected=judged.expected,
            loss_difference=of.difference,
            problems=judged.problems + of.problems,
            explanations=judged.explanations,
            judged=judged.judged,
        )
        findings.append(found)
    return findings


def markdown(findings: Sequence[Finding]) -> str:
    """A table of the findings, and the reasons that it refers to."""
    loss = f"loss from {REFERENCE}'s"
    numbers = ("Micro-batches", "MB a step", "least MB", "factor", "of expected", loss)
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
            text.number(finding.of_expected),
            text.number(finding.loss_difference, 2),
            text.escaped(finding.verdict),
        )
        rows.append(row)
    words = ("Strategy", "Tuning", "verdict")
    shown = text.table((*words[:2], *numbers, words[2]), rows, words)
    below = [f"[{index}] {reason}." for reason, index in reasons.items()]
    return "\n".join([shown, "", *below]) + "\n"


@dataclass(frozen=True)
class _Bytes:
    """Judgement of the bytes that a cell sends."""

    expected: float | None = None
    problems: tuple[str, ...] = ()
    explanations: tuple[str, ...] = ()
    judged: bool = True


def _judge_bytes(record: Record, measured: Measurement) -> _Bytes:
    """Compare what a cell sends with its closed form, and with the payload of its transport."""
    cell, least = record.cell, measured.inter_node_bytes_closed_form
    sent = measured.inter_node_bytes_per_step
    if least is None:
        return _Bytes(judged=False)
    if not least and getattr(cell.settings, "gather_codec", "none") in DIFFERENCES:
        return _Bytes(explanations=(_DIFFERENCES,), judged=False)
    lowest = _LEAST_OF_DEEPSPEED if measured.engine == "deepspeed" else _LEAST
    if reason := why_not_simulated(cell):
        if sent < lowest * least:
            return _Bytes(problems=(_TOO_LITTLE,))
        beyond = f"What it sends beyond the least was not judged, as {cell.model.name} {reason}"
        return _Bytes(explanations=(beyond,))
    workload, nodes, ranks = modelled.framed(cell)
    hardware = modelled.cluster_of(cell)
    # The simulator has no rates of fp32 on GPUs.
    if record.hardware.get("gpus") and cell.dtype == "bfloat16":
        hardware = replace(hardware, backend="nccl")
    payload = predict(workload, hardware).inter_node_bytes
    expected = framing.counted_bytes(workload, nodes, ranks, payload)
    if sent < lowest * min(least, payload):
        return _Bytes(expected, problems=(_TOO_LITTLE,))
    most = _RING_OF_CO2 * payload if measured.engine == "co2" else payload
    if sent > most + framing.excess_bytes(workload, nodes, ranks, payload):
        return _Bytes(expected, problems=("sends more than is explained",))
    if sent < _LEAST * least:
        return _Bytes(expected, explanations=(_LIVE_PARAMETERS,))
    if sent <= _NEAR * least:
        return _Bytes(expected)
    explanations = []
    if payload > _NEAR * least or sent > _NEAR * expected:
        explanations.append(_TRANSPORTS.get(measured.engine, _RING))
    if expected > _NEAR * payload or not explanations:
        explanations.append(_WHOLE if measured.engine == "deepspeed" else _MESSAGES)
    return _Bytes(expected, explanations=tuple(explanations))
