"""How a strategy divides a model into units, and which computation waits for which."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fcdp import grouping
from simulation.transformer import Shape, padded_numel
from simulation.workload import Workload

#: Matrices whose input, in the first block, comes from the embeddings through a norm.
_READS_EMBEDDINGS = ("attn.c_attn", "q_proj", "k_proj", "v_proj", "qkv_proj")
#: Layouts in the cache: enough for all strategies on several clusters.
_REMEMBERED = 256


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit by its sizes, in parameters: one gather, and a reduction if any of it is trained."""

    name: str
    parameters: int
    #: Parameters that a gather moves: with FSDP2's padding of each to a multiple of the ranks.
    gathered: int
    #: Trained ones of these, which a reduction moves.
    trained: int
    #: Whether it stays gathered from forward to backward.
    stays_gathered: bool = False

    @property
    def reuses(self) -> int:
        """How often a step gathers it again without it having changed, as the library counts."""
        return grouping.reuses(in_backward=not self.stays_gathered, frozen=self.trained == 0)


@dataclass(frozen=True)
class Segment:
    """A stretch of computation of one rank and token, and the units that it waits for."""

    name: str
    #: Index of the block's kind in ``Workload.parts``; -1: what comes after the blocks.
    kind: int
    units: tuple[Unit, ...]
    #: Share of the block's computation.
    share: float = 1.0
    #: Whether it is the first of its block.
    block: bool = False
    #: Whether backward gathers the units: autograd computes no gradient of an input on which no
    #: trained parameter had an effect.
    in_backward: bool = True


@dataclass(frozen=True, eq=False)
class Layout:
    """A model under one strategy: its units and its computation."""

    #: The unit of what is outside of the blocks; gathered for all of forward and backward.
    root: Unit
    #: The blocks' computation in the order of forward, and what comes after them.
    segments: tuple[Segment, ...]
    head: Segment
    #: Replicated parameters: those below the vendor's threshold, or all.
    replicated: int
    #: Trained ones of these.
    replicated_trained: int

    @cached_property
    def units(self) -> list[Unit]:
        """All units, each once, in the order of their first gather."""
        ordered = [self.root, *(unit for segment in self.segments for unit in segment.units)]
        return list(dict.fromkeys(ordered))

    @cached_property
    def largest(self) -> int:
        """Parameters of the largest unit that does not stay gathered."""
        return max((unit.parameters for unit in self.units if not unit.stays_gathered), default=0)


def shard_numel(parameters: int, world_size: int) -> int:
    """Elements of one rank's shard, padding included."""
    return -(-parameters // world_size)


def layout(workload: Workload, nodes: int, ranks_per_node: int) -> Layout:
    """Units and computation of the workload's model under its strategy."""
    # None depends on these, of which a search tries many.
    alike = workload.changed(
        sequence_length=1,
        micro_batch=1,
        accumulation=1,
        kernels="flash",
        recomputed=0.0,
        checkpointing="full",
    )
    return _layout(alike, nodes, ranks_per_node)


@lru_cache(maxsize=_REMEMBERED)
def _layout(workload: Workload, nodes: int, ranks_per_node: int) -> Layout:
    model, schedule, full = workload.model, workload.schedule, workload.lora is None
    # A replicated model gathers nothing, and reduces all gradients at once.
    whole = schedule.shards == "rank" and schedule.hierarchical
    sharers = schedule.sharers(nodes, ranks_per_node) if schedule.pads else 1

    def gathered(rows: Iterable[Shape]) -> int:
        return 0 if whole else padded_numel(rows, sharers, cut_rows=schedule.cuts_low_rank)

    moved = gathered(model.root_rows)
    root = Unit("root", model.root_parameters, moved, moved if full else 0, stays_gathered=True)
    head = Segment("head", -1, (root,))
    if schedule.unit == "matrix":
        # DeepSpeed's: vectors and adapters are below its threshold, and their changes reach all
        # ranks by a gather after each step.
        weights = workload.total(lambda each: sum(m.weights for m in each.model.matrices))
        adapters = workload.adapters
        vectors = model.parameters - model.root_parameters - weights
        trained = vectors if full else adapters
        return Layout(root, _by_matrix(workload), head, vectors + adapters, trained)
    replicated = (workload.parameters, workload.trained) if whole else (0, 0)
    return Layout(root, _by_block(workload, ranks_per_node, gathered), head, *replicated)


@dataclass(frozen=True)
class _Part:
    """All parameters of one block that are frozen, or all that are trained."""

    trained: bool
    parameters: int
    #: With padding, as of :class:`Unit`.
    gathered: int
    #: Bytes of the whole parameters as ranks hold them.
    nbytes: float


def _by_block(
    workload: Workload, ranks_per_node: int, gathered: Callable[[Iterable[Shape]], int]
) -> tuple[Segment, ...]:
    """A unit per block, and units of what must not share one, as ``fcdp.grouping`` has them."""
    kinds = [_parts(part, gathered) for part in workload.parts]  # blocks of a kind are alike
    order, apart = workload.model.order, workload.schedule.apart
    others = _apart(kinds, order, ranks_per_node) if apart else {}
    trained = (
        block for block, kind in enumerate(order) if any(part.trained for part in kinds[kind])
    )
    # FSDP2 gathers a block ahead, and so one more than backward needs.
    last = next(trained, 0) - 1
    segments = []
    for block, kind in enumerate(order):
        unit = _unit(f"block {block}", kinds[kind][:1] if apart else kinds[kind])
        units = (unit, *others.get(block, ()))
        segments.append(Segment(unit.name, kind, units, block=True, in_backward=block >= last))
    return tuple(segments)


def _parts(block: Workload, gathered: Callable[[Iterable[Shape]], int]) -> list[_Part]:
    """The parts of a block; the one that keeps the block's own unit comes first."""
    model, lora = block.model, block.lora
    held = block.sharded_bytes if lora is None else block.frozen_sharded_bytes
    size = model.block_parameters
    parts = [_Part(lora is None, size, gathered(model.block_rows), held * size)]
    if lora is not None and (size := block.block_adapters):
        moved = gathered(model.adapter_rows(lora))
        parts.append(_Part(True, size, moved, block.sharded_bytes * size))
    kept = grouping.kept({part.trained: part.parameters for part in parts})
    return sorted(parts, key=lambda part: part.trained != kept)


def _apart(
    kinds: Sequence[Sequence[_Part]], order: Sequence[int], ranks_per_node: int
) -> dict[int, list[Unit]]:
    """Units beside the blocks' own, by the block that uses them first."""
    parts = [(block, part) for block, kind in enumerate(order) for part in kinds[kind][1:]]
    sizes = (sum(part.nbytes for part in kind) for kind in kinds)
    stay = grouping.stay_gathered((part.nbytes for _, part in parts), sizes, ranks_per_node)
    together = [[at] for at in range(len(parts))]
    if stay:
        together = grouping.buckets([(part.trained, part.nbytes) for _, part in parts])
    units: dict[int, list[Unit]] = {}
    for first, *rest in together:
        block, part = parts[first]
        name = f"{'adapters' if part.trained else 'frozen'} {block}"
        unit = _unit(name, [part, *(parts[at][1] for at in rest)], stay)
        units.setdefault(block, []).append(unit)
    return units


def _unit(name: str, parts: Sequence[_Part], stays_gathered: bool = False) -> Unit:
    parameters, gathered = sum(p.parameters for p in parts), sum(p.gathered for p in parts)
    trained = sum(part.gathered for part in parts if part.trained)
    return Unit(name, parameters, gathered, trained, stays_gathered)


def _by_matrix(workload: Workload) -> tuple[Segment, ...]:
    """A unit per matrix or unfused expert, as DeepSpeed has them; none for what blocks share."""
    full = workload.lora is None
    kinds = []  # blocks of a kind are alike
    for part in workload.parts:
        active = sum(matrix.active_weights for matrix in part.model.matrices)
        pieces = []
        for matrix in part.model.matrices:
            count = 1 if matrix.fused else max(1, matrix.experts)
            piece = matrix.name, matrix.weights // count, matrix.active_weights / count / active
            ends = [f" {index}" for index in range(count)] if count > 1 else [""]
            pieces += [(matrix.name + end, *piece) for end in ends]
        kinds.append(pieces)
    segments = []
    for block, kind in enumerate(workload.model.order):
        for index, (title, of, size, share) in enumerate(kinds[kind]):
            name = f"block {block} {title}"
            units = (Unit(name, size, size, size if full else 0),) if size else ()
            needed = block > 0 or full or of not in _READS_EMBEDDINGS
            segments.append(Segment(name, kind, units, share, index == 0, needed))
    return tuple(segments)
