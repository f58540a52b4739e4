"""Headers and small messages: as many as the schedule has, and as the kernel has counted."""

import pytest

from baselines.encoding import EXPONENTS
from experiments.records.allowed import why_not_simulated
from experiments.records.modelled import framed
from experiments.records.record import Record, read
from experiments.records.select import FILE
from simulation import files, framing
from simulation.framing import MESSAGE_BYTES, SHARE, framing_bytes
from tests.experiments.cells import cell
from tests.programs import RESULTS

#: On 5 Mbit/s up to a quarter more beside the payload than framing has: what waits long in the
#: link's queue TCP takes for lost, and sends it twice. Of the frames of such a run 0.9 % were sent
#: again, and their receivers had had each of them (RetransSegs and D-SACKs, as many of both).
SENT_TWICE = "delta-slow-link"


@pytest.mark.parametrize(
    ("strategy", "tuning", "accumulation", "messages"),
    [
        # Each of two ranks to its partner: a barrier, an agreement, and of three units (two
        # blocks and what is around them) a gather and a reduction.
        ("hpz", "full", 1, 2 * (1 + 1 + 3 + 3)),
        # Blocks once more in backward, and all of it for each micro-batch; deferred reductions.
        ("zero3", "full", 4, 2 * (1 + 4 + 4 * 5 + 3)),
        # Nobody asks what is stale, and each micro-batch is reduced.
        ("fsdp2-hierarchical", "full", 4, 2 * (1 + 4 * 5 + 4 * 3)),
        # Adapters are one unit; frozen blocks are cached for ever.
        ("fcdp", "lora", 8, 2 * (1 + 8 + 1 + 1)),
        # A ring of four instead of partners, but for what ranks agree on; no reduction waits.
        ("fcdp-paper", "lora", 8, 2 * (1 + 8) + 6 * (1 + 8)),
        ("replicated", "full", 4, 2 * (1 + 2)),
        # All-reduces between partners, over rings of two.
        ("mics", "lora", 4, 2 * (1 + 4 * 2)),
        # Rings round four ranks, in halves: five gathers; three reductions, which go round twice.
        ("fsdp2", "full", 1, 2 + 6 * 5 + 12 * 3),
        ("ddp", "full", 4, 2 + 12 * 3),
        # Both stages' gradients and new parameters, and those of backward, from one node's last
        # rank to the next node; no collective.
        ("cyclic-ring", "full", 1, 2 + 2 * 2),
        ("cyclic-zero", "full", 1, 2 + 3 * 2),
        # A reduction per stage, of which there are as many as micro-batches.
        ("cyclic-interleaved", "full", 2, 2 + 12 * 2),
        # One reduction; 8 vectors and 4 adapters a block and 2 vectors more, one by one.
        ("deepspeed-hpz", "lora", 1, 2 + 12 * 1 + 6 * (2 * 12 + 2)),
    ],
)
def test_messages_are_those_of_the_exchanges(
    strategy: str, tuning: str, accumulation: int, messages: int
) -> None:
    settings = {"stages": 2} if strategy.startswith("cyclic") else {}
    trained = cell(strategy, tuning=tuning, accumulation=accumulation, **settings)
    assert framing.messages(*framed(trained)) == messages


def test_a_policy_that_may_keep_less_than_all_is_taken_to_keep_nothing() -> None:
    cells = (cell("fcdp", policy=policy) for policy in ("none", "threshold(0.8)", "host"))
    none, some, whole = (framing.messages(*framed(each)) for each in cells)
    assert some == none > whole
    # A disk is asked before each gather.
    host, disk = (cell("fcdp", policy=policy, accumulation=2) for policy in ("host", "disk"))
    # Three units, gathered in forward and in backward of two micro-batches, by two ranks.
    assert framing.messages(*framed(disk)) - framing.messages(*framed(host)) == 2 * 2 * 2 * 3


def test_deepspeed_keeps_vectors_and_adapters_whole() -> None:
    # gpt2-2x128: 1664 elements of vectors and 6144 of adapters a block, 256 of the last norm;
    # of each node's half one copy leaves it, 4 bytes an element.
    assert framing.whole_bytes(*framed(cell("deepspeed-hpz", tuning="lora"))) == 2 * (2 * 7808)
    assert framing.whole_bytes(*framed(cell("fcdp", tuning="lora"))) == 0


def ledger(record: Record) -> float:
    """Payload between nodes by our engine's own count, if it has run on emulated nodes."""
    if not record.measurement or record.evidence != "emulated" or record.cell.matrix == SENT_TWICE:
        return 0.0
    by_link = record.measurement.ledger_bytes_per_step or {}
    return sum(by_link.get("inter_node", {}).values())


@pytest.mark.system  # reads all committed records
def test_counted_bytes_are_the_ledgers_and_framing_and_none_is_needless() -> None:
    """Every committed record is read that has a count of the payload."""
    records = [record for file in files.below(RESULTS, FILE) for record in read(file)]
    used = []
    for record in records:
        payload = ledger(record)
        if not payload or why_not_simulated(record.cell) is not None:
            continue
        # The ledger is the first node's, and what is coded exactly differs from node to node.
        if getattr(record.cell.settings, "reduce_codec", "none") in EXPONENTS:
            continue
        # And nodes at the ends of a pipeline send less than those between them.
        if record.cell.strategy == "pipeline" and record.cell.cluster.nodes > 2:
            continue
        beside = record.measurement.inter_node_bytes_per_step - payload
        assert 0 < beside < framing_bytes(*framed(record.cell), payload), record.cell_id
        messages = framing.messages(*framed(record.cell))
        used.append((beside - SHARE * payload) / messages)
    assert len(used) > 100
    assert max(used) > 0.8 * MESSAGE_BYTES
