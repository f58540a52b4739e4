"""How a strategy divides a model into units, and which computation waits for which."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from simulation.hardware import Work
from simulation.transformer import Rows, padded_numel
from simulation.workload import FP32, Workload, block_passes, head_work

#: As ``fcdp.partition`` has them: adapters that stay gathered share units of this size at most.
_BUCKET_BYTES = 25 * 2**20
#: Matrices whose input, in the first block, comes from the embeddings through a norm.
_READS_EMBEDDINGS = ("attn.c_attn", "q_proj", "k_proj", "v_proj", "qkv_proj")
#: Layouts that are remembered: those of one strategy's points.
_REMEMBERED = 32


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
    kept: bool = False


@dataclass(frozen=True)
class Segment:
    """A stretch of computation of one rank and token, and the units that it waits for."""

    name: str
    forward: Work
    #: With a second forward, as far as the block's activations are not kept.
    backward: Work
    units: tuple[Unit, ...]
    #: Whether it is the first of its block.
    block: bool = False
    #: Whether backward needs the units: the gradient of an input that nothing trained has made is
    #: not computed.
    in_backward: bool = True


@dataclass(frozen=True)
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
        """Parameters of the largest unit that is not kept."""
        return max((unit.parameters for unit in self.units if not unit.kept), default=0)


def shard_numel(parameters: int, world_size: int) -> int:
    """Elements of one rank's shard, padding included."""
    return -(-parameters // world_size)


def layout(workload: Workload, nodes: int, ranks_per_node: int) -> Layout:
    """Units and computation of the workload's model under its strategy."""
    # Neither depends on how many tokens there are, of which a search tries many.
    return _layout(replace(workload, micro_batch=1, accumulation=1), nodes, ranks_per_node)


@lru_cache(maxsize=_REMEMBERED)
def _layout(workload: Workload, nodes: int, ranks_per_node: int) -> Layout:
    model = _Model(workload, nodes, ranks_per_node)
    return model.by_matrix() if workload.schedule.unit == "matrix" else model.by_block()


class _Model:
    """One workload's model while it is divided."""

    def __init__(self, workload: Workload, nodes: int, ranks_per_node: int) -> None:
        self._workload = workload
        self._schedule = workload.schedule
        self._ranks_per_node = ranks_per_node
        self._full = workload.lora is None
        #: A replicated model gathers nothing, and reduces all gradients at once.
        self._whole = self._schedule.shards == "rank" and self._schedule.hierarchical
        self._sharers = self._schedule.sharers(nodes, ranks_per_node) if self._schedule.pads else 1
        lora = workload.lora
        self._adapter_rows = [] if lora is None else workload.model.adapter_rows(lora)

    def by_block(self) -> Layout:
        model = self._workload.model
        apart = self._schedule.apart and not self._full
        adapters = self._adapters() if apart else {}
        inside = [] if apart else self._adapter_rows
        base, more = self._gathered(model.block_rows), self._gathered(inside)
        size = padded_numel([*model.block_rows, *inside], 1)
        passes = block_passes(self._workload)
        segments = []
        for block in range(model.layers):
            name = f"block {block}"
            own = Unit(name, size, base + more, base + more if self._full else more)
            units = (own, *adapters.get(block, ()))
            segments.append(Segment(name, *passes, units, block=True))
        root, workload = self._root(), self._workload
        replicated = (workload.parameters, workload.trained) if self._whole else (0, 0)
        head = Segment("head", *head_work(workload), (root,))
        return Layout(root, tuple(segments), head, *replicated)

    def _gathered(self, rows: list[Rows]) -> int:
        if self._whole:
            return 0
        return padded_numel(rows, self._sharers, cut_rows=self._schedule.cuts_low_rank)

    def _root(self) -> Unit:
        rows = self._workload.model.root_rows
        gathered = self._gathered(rows)
        trained = gathered if self._full else 0
        return Unit("root", padded_numel(rows, 1), gathered, trained, kept=True)

    def _adapters(self) -> dict[int, list[Unit]]:
        """Units of adapters, by the block that uses them first: see ``fcdp.partition``."""
        layers, adapters = self._workload.model.layers, self._workload.block_adapters
        gathered = self._gathered(self._adapter_rows)
        kept = layers * adapters <= self._workload.block_parameters / self._ranks_per_node
        count = max(1, _BUCKET_BYTES // (FP32 * adapters)) if kept else 1
        units: dict[int, list[Unit]] = {}
        for first in range(0, layers, count):
            held = min(count, layers - first)
            moved = held * gathered
            units[first] = [Unit(f"adapters {first}", held * adapters, moved, moved, kept)]
        return units

    def by_matrix(self) -> Layout:
        """DeepSpeed's layout: a unit per matrix; vectors and adapters are below its threshold.

        Their changes reach all ranks by a gather after each step.
        """
        model, workload = self._workload.model, self._workload
        active = sum(matrix.active_weights for matrix in model.matrices)
        # Blocks are alike, and share what is the same in all.
        pieces = []
        for matrix in model.matrices:
            part = matrix.active_weights / matrix.experts / active
            forward, backward = block_passes(workload, part)
            for index in range(matrix.experts):
                name = f"{matrix.name} {index}" if matrix.experts > 1 else matrix.name
                pieces.append((name, matrix, forward, backward))
        segments = []
        for block in range(model.layers):
            for index, (title, matrix, forward, backward) in enumerate(pieces):
                name, size = f"block {block} {title}", matrix.size
                unit = Unit(name, size, size, size if self._full else 0)
                needed = block > 0 or self._full or matrix.name not in _READS_EMBEDDINGS
                segments.append(Segment(name, forward, backward, (unit,), index == 0, needed))
        weights = sum(matrix.weights for matrix in model.matrices)
        vectors = model.layers * (model.block_parameters - weights)
        adapters = model.layers * workload.block_adapters
        trained = vectors if self._full else adapters
        root = self._root()
        head = Segment("head", *head_work(workload), (root,))
        return Layout(root, tuple(segments), head, vectors + adapters, trained)
