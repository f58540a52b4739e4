"""Whether each strategy did what it is compared for: its bytes, and what it learned.

A baseline that sends less than its schedule must has kept parameters alive; one that sends more
uses a wasteful backend, which is a finding only if it is known why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.text import ABSENT, number, times
from experiments.records import FRAMING_BYTES, Cell, Measurement, Record

#: What the strategies' losses are compared with.
REFERENCE = "fsdp2"


@dataclass(frozen=True)
class Allowance:
    """How many times its closed form an engine may send over gloo, and why."""

    factor: float
    why: str
    #: It may send less, down to this share, if there is a reason.
    least: float = 0.98
    why_less: str = ""


_EXACT = Allowance(1.05, "")
_GLOO = Allowance(
    3.1,
    "Over 2 × 2 ranks gloo's gathers send 1.5 times the least (a ring over all ranks crosses each "
    "node's link with 3/4 of a buffer, a hierarchy with 1/2), its reduce-scatters 3 times (each "
    "is an all-reduce over that ring)",
)
_KEPT = (
    "DeepSpeed does not gather again in backward what it still holds from the end of forward, more "
    "than a block: of a model of two blocks that is a large share, in its favour"
)
_ALLOWANCES = {
    "fsdp2": _GLOO,
    "deepspeed": replace(_GLOO, least=0.9, why_less=_KEPT),
    "ddp": Allowance(1.6, "Gloo's all-reduce is one ring over all ranks, not one inside each node"),
    "fcdp": _EXACT,
}
#: Relative difference of each step's loss: the summation order; a quantised exchange.
_SAME, _ROUNDED = 1e-4, 0.05
_QUANTISED = ("qwz", "qgz", "zeropp")


@dataclass(frozen=True)
class Finding:
    """What the audit says of one cell."""

    cell: Cell
    sent: float
    least: float | None
    #: The largest relative difference of a step's loss from the reference's; ``None`` without one.
    loss_difference: float | None
    problems: tuple[str, ...]
    explanation: str

    @property
    def factor(self) -> float | None:
        return self.sent / self.least if self.least else None


def audit(records: Sequence[Record]) -> list[Finding]:
    """One finding for each cell that ran, in the order of the records."""
    measured = [(r.cell, r.measurement) for r in records if r.measurement is not None]
    references = {_group(c): m.losses for c, m in measured if c.strategy == REFERENCE}
    return [_find(cell, ours, references.get(_group(cell))) for cell, ours in measured]


def markdown(findings: Sequence[Finding]) -> str:
    """A table of the findings, and the reasons that it refers to."""
    lines = [
        "| Strategy | Tuning | Micro-batches | MB a step | least MB | factor | loss from "
        f"{REFERENCE}'s | verdict |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    reasons: dict[str, int] = {}
    for finding in findings:
        note = ""
        if finding.explanation:
            note = f" [{reasons.setdefault(finding.explanation, len(reasons) + 1)}]"
        cell, least = finding.cell, finding.least
        columns = [
            cell.variant,
            cell.tuning,
            str(cell.accumulation),
            number(finding.sent / 1e6),
            ABSENT if least is None else number(least / 1e6),
            times(finding.factor) + note,
            number(finding.loss_difference, 2),
            "; ".join(finding.problems) or "fair",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    lines += ["", *(f"[{index}] {reason}." for reason, index in reasons.items())]
    return "\n".join(lines) + "\n"


def _find(cell: Cell, measured: Measurement, reference: list[float] | None) -> Finding:
    sent, least = measured.inter_node_bytes_per_step, measured.inter_node_bytes_closed_form
    allowance = _ALLOWANCES[measured.engine]
    problems = []
    explanation = ""
    if least is not None:
        if sent < allowance.least * least:
            problems.append("sends less than its schedule must")
        elif sent > allowance.factor * least + FRAMING_BYTES:
            problems.append("sends more than is explained")
        elif sent > _EXACT.factor * least + FRAMING_BYTES:
            explanation = allowance.why
        elif sent < _EXACT.least * least:
            explanation = allowance.why_less
    difference = None
    if reference is not None:
        pairs = zip(measured.losses, reference, strict=False)
        difference = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
        if difference > _tolerance(cell):
            problems.append("learns something else")
    return Finding(cell, sent, least, difference, tuple(problems), explanation)


def _tolerance(cell: Cell) -> float:
    quantised = cell.strategy.endswith(_QUANTISED)
    quantised |= (cell.gather_codec, cell.reduce_codec) != ("none", "none")
    return _ROUNDED if quantised else _SAME


def _group(cell: Cell) -> tuple[object, ...]:
    """What cells have in common that train on the same batches."""
    return (
        cell.model,
        cell.tuning,
        cell.cluster.nodes,
        cell.cluster.ranks_per_node,
        cell.sequence_length,
        cell.micro_batch,
        cell.accumulation,
        cell.dtype,
        cell.lora_rank,
        cell.learning_rate,
        cell.seed,
    )
