"""Protocol overhead: bytes per step that a node sends beside the payload.

These are headers, acknowledgements and announcements: of large buffers a share, of small ones a
number of bytes per message. A message over gloo is two packets and their acknowledgements: the
data, and the receiver's word that it is ready.
"""

from collections import Counter

from simulation.cycle import cycle_of, stages_of
from simulation.luwu import traffic
from simulation.units import Layout, layout
from simulation.workload import Workload

#: Ethernet's, IP's and TCP's headers, 66 bytes of each frame of 9000, and as many again where each
#: frame is acknowledged by one of its own.
SHARE = 0.015
#: Ethernet's, IP's and TCP's headers of one frame, and the bytes of other kinds in a frame of 9000.
_HEADER_BYTES, _FRAME_PAYLOAD_BYTES = 66, 8934
#: Frames that an acknowledgement stands for.
_ACKNOWLEDGED = 2
#: Four such headers and gloo's own two.
GLOO_MESSAGE_BYTES = 350
#: None of the committed records needs more than 500.
MESSAGE_BYTES = 600
#: Halves of a buffer that go round gloo's rings one after the other.
_SEGMENTS = 2
#: Policies with an entry for every unit.
_KEEPS_ALL = ("device", "host", "disk")


def framing_bytes(workload: Workload, nodes: int, ranks_per_node: int, payload: float) -> float:
    """Bytes of protocol overhead that a node may send per step, beside ``payload`` bytes.

    Records of before 2026-11-28 have an agreement per micro-batch, where one per step is sent now.
    """
    sent = messages(workload, nodes, ranks_per_node)
    if not workload.served and workload.schedule.cache:
        sent += (workload.accumulation - 1) * ranks_per_node * (nodes - 1)
    return SHARE * payload + MESSAGE_BYTES * sent


def counted_bytes(workload: Workload, nodes: int, ranks_per_node: int, payload: float) -> float:
    """Bytes that the kernel of a node counts per step for ``payload`` bytes, by their headers.

    Each frame has headers, every second one an acknowledgement, and each message gloo's two. Where
    no link is shaped the kernel counts the headers of some frames once for several.
    """
    headers = _HEADER_BYTES * (1 + 1 / _ACKNOWLEDGED) / _FRAME_PAYLOAD_BYTES
    sent = messages(workload, nodes, ranks_per_node)
    return (1 + headers) * payload + GLOO_MESSAGE_BYTES * sent


def excess_bytes(workload: Workload, nodes: int, ranks_per_node: int, payload: float) -> float:
    """Bytes per step that may be counted beside the ``payload`` predicted for a node.

    Protocol overhead, and a share of the payload where the prediction is an estimate.
    """
    estimated = 0.0 if workload.served else workload.schedule.estimated_share
    return estimated * payload + framing_bytes(workload, nodes, ranks_per_node, payload)


def agree(
    workload: Workload, nodes: int, ranks_per_node: int, *, predicted: float, counted: float
) -> bool:
    """Whether the kernel counted the bytes that were predicted, within protocol overhead.

    ``predicted`` and ``counted`` are bytes per step that one node sends.
    """
    allowed = excess_bytes(workload, nodes, ranks_per_node, predicted)
    return abs(counted - predicted) <= allowed


def messages(workload: Workload, nodes: int, ranks_per_node: int) -> int:
    """Messages per step that a node sends to others over gloo: at least as many as there are.

    They belong to gathers and reductions across nodes, to our engine's agreement on what is stale
    once per step and on what a disk holds before each gather, and to a barrier.
    """
    if workload.served:
        whole = traffic(workload, nodes * ranks_per_node, ranks_per_node)
        return ranks_per_node * whole.worker_messages
    if nodes == 1:
        return 0
    schedule = workload.schedule
    units = layout(workload, nodes, ranks_per_node)
    # Messages of a node: from each rank to its partner on each other node; round a ring of all
    # ranks, which a reduction passes twice.
    pairwise = ranks_per_node * (nodes - 1)
    if schedule.passes_on:
        ranks = nodes * ranks_per_node
        cycle = cycle_of(workload, stages_of(workload, ranks), ranks)
        ends = ((m.source // ranks_per_node, m.target // ranks_per_node) for m in cycle.messages())
        # Messages of stages, of the node that sends most.
        return pairwise + max(Counter(source for source, to in ends if source != to).values())
    if schedule.cut:
        groups = nodes // workload.nodes_per_stage
        # To both neighbours, and of tokens, losses and tied embeddings a few to each group.
        messages = 2 * workload.stages_per_node * groups * workload.accumulation + 4 * groups
        within = workload.nodes_per_stage > 1
        return pairwise + ranks_per_node * (messages + within * 4 * len(units.units) * nodes)
    ring = _SEGMENTS * (nodes * ranks_per_node - 1)
    gathers, reductions = _gathers(workload, units), _reductions(workload, units)
    if schedule.shards == "node":  # by an all-reduce of gloo's among partners
        return (1 + 2 * _SEGMENTS * reductions) * pairwise
    if schedule.pairwise:
        kept = schedule.keeps_in(workload.policy) or ""
        asked = 2 * len(units.units) if "disk" in kept or ":" in kept else 0  # or one's own class
        agreements = (1 + workload.accumulation * asked) if schedule.cache else 0
        per_exchange = pairwise if schedule.hierarchical else ring
        return (1 + agreements) * pairwise + (gathers + reductions) * per_exchange
    replicated = 0
    if schedule.replicates_small:  # vectors and adapters, which DeepSpeed gathers one by one
        replicated = sum(shape[-1] == 1 for shape in workload.model.root_rows)
        replicated += workload.total(lambda each: sum(s[-1] == 1 for s in each.model.block_rows))
        replicated += workload.total(lambda each: 2 * len(each.lora.targets) if each.lora else 0)
    return pairwise + ring * (gathers + replicated) + 2 * ring * reductions


def _gathers(workload: Workload, units: Layout) -> int:
    """Gathers per step that cross nodes."""
    schedule = workload.schedule
    if schedule.shards != "world":
        return 0
    place = schedule.keeps_in(workload.policy)
    gathers = 0
    for unit in units.units:
        if place not in _KEEPS_ALL:  # kept nowhere, or not certainly
            gathers += workload.accumulation * (1 if unit.stays_gathered else 2)
        elif schedule.cached_for == "micro-batch":
            gathers += workload.accumulation
        else:
            gathers += schedule.cached_for == "step" or unit.trained > 0
    return gathers


def _reductions(workload: Workload, units: Layout) -> int:
    """Reductions per step that cross nodes; our all-reduce is two exchanges."""
    schedule = workload.schedule
    trained = sum(unit.trained > 0 for unit in units.units)
    if schedule.cycle == "turns":  # a stage's together, when its last micro-batch has come through
        return workload.stages or workload.accumulation
    if schedule.unit == "matrix":  # gradients of a block's matrices are reduced together
        trained = min(trained, workload.model.layers + 1)
    if units.replicated_trained:
        trained += 1 if schedule.replicates_small else 2
    return trained * (1 if schedule.accumulates_without_sync else workload.accumulation)
