"""How a strategy divides a model: what is gathered at a time, and what each gather is for."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.costs.strategies import Scheme
from experiments.costs.workload import Workload

#: As ``fcdp.partition`` has them: adapters that stay gathered share units of this size at most.
_BUCKET_BYTES = 25 * 2**20
_STORED_BYTES = 4
#: Matrices whose input, in the first block, comes from the embeddings through a norm.
_READS_EMBEDDINGS = ("attn.c_attn", "q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, eq=False)
class Unit:
    """One gather, and one reduction if any of it is trained."""

    name: str
    parameters: int
    #: Parameters of it that are trained.
    trained: int
    #: Whether it stays gathered from forward to backward.
    kept: bool = False


@dataclass(frozen=True)
class Segment:
    """A stretch of computation of one rank and token, and the units that it waits for."""

    name: str
    forward_flops: float
    backward_flops: float
    units: tuple[Unit, ...]
    #: Whether it is the first of its block.
    block: bool = False
    #: Whether backward needs the units: the gradient of an input that nothing trained has made is
    #: not computed.
    in_backward: bool = True


@dataclass(frozen=True)
class Layout:
    """A model under one strategy."""

    #: What is outside of the blocks; gathered for all of forward and backward.
    root: Unit
    #: The blocks' computation in the order of forward, and what comes after them.
    segments: tuple[Segment, ...]
    head: Segment
    #: Parameters that every rank keeps whole, by the vendor's threshold or as replicated adapters.
    whole: int
    #: Those of them that are trained.
    whole_trained: int

    @property
    def units(self) -> list[Unit]:
        """In the order of their first gather, each once."""
        ordered = [self.root, *(unit for segment in self.segments for unit in segment.units)]
        return list(dict.fromkeys(ordered))

    @property
    def largest(self) -> int:
        """Parameters of the largest unit that is not kept."""
        return max((unit.parameters for unit in self.units if not unit.kept), default=0)


def layout(workload: Workload, scheme: Scheme, ranks_per_node: int) -> Layout:
    """Units and computation of the workload's model under ``scheme``."""
    model, lora, length = workload.model, workload.lora, workload.sequence_length
    full = lora is None
    root = Unit("root", model.root_parameters, model.root_parameters if full else 0, kept=True)
    head = Segment("head", model.head_flops, (2 if full else 1) * model.head_flops, (root,))
    if scheme.unit == "matrix":
        return _by_matrix(workload, root, head)
    if scheme.shards == "rank" and scheme.hierarchical:
        return _whole(workload, root, head)
    apart = scheme.apart and not full
    replicated = apart and workload.adapters == "replicated"
    adapters = workload.block_adapters
    buckets = _buckets(workload, ranks_per_node) if apart and not replicated else {}
    segments = []
    for block in range(model.layers):
        units = []
        if apart:
            units.append(Unit(f"block {block}", model.block_parameters, 0))
            units += buckets.get(block, ())
        else:
            own = model.block_parameters + adapters
            units.append(Unit(f"block {block}", own, own if full else adapters))
        segments.append(
            Segment(
                f"block {block}",
                model.block_forward_flops(length, lora),
                model.block_backward_flops(length, lora),
                tuple(units),
                block=True,
            )
        )
    whole = model.layers * adapters if replicated else 0
    return Layout(root, tuple(segments), head, whole, whole)


def _whole(workload: Workload, root: Unit, head: Segment) -> Layout:
    """Nothing is gathered, and all gradients are reduced in one piece."""
    model, lora, length = workload.model, workload.lora, workload.sequence_length
    segments = tuple(
        Segment(
            f"block {block}",
            model.block_forward_flops(length, lora),
            model.block_backward_flops(length, lora),
            (Unit(f"block {block}", model.block_parameters + workload.block_adapters, 0),),
            block=True,
        )
        for block in range(model.layers)
    )
    untrained = Unit(root.name, root.parameters, 0, kept=True)
    return Layout(
        untrained,
        segments,
        Segment(head.name, head.forward_flops, head.backward_flops, (untrained,)),
        workload.parameters,
        workload.trained,
    )


def _buckets(workload: Workload, ranks_per_node: int) -> dict[int, list[Unit]]:
    """Units of adapters, by the block that uses them first: see ``fcdp.partition``."""
    layers, adapters = workload.model.layers, workload.block_adapters
    block = workload.model.block_parameters + adapters
    if layers * adapters > block / ranks_per_node:
        return {index: [Unit(f"adapters {index}", adapters, adapters)] for index in range(layers)}
    a_bucket = max(1, _BUCKET_BYTES // (_STORED_BYTES * adapters))
    return {
        first: [
            Unit(
                f"adapters {first}",
                adapters * min(a_bucket, layers - first),
                adapters * min(a_bucket, layers - first),
                kept=True,
            )
        ]
        for first in range(0, layers, a_bucket)
    }


def _by_matrix(workload: Workload, root: Unit, head: Segment) -> Layout:
    """DeepSpeed: a gather a matrix; vectors and adapters stay whole, by the persistence threshold.

    Their changes reach all ranks by a gather after each step.
    """
    model, lora, length = workload.model, workload.lora, workload.sequence_length
    full = lora is None
    weights = sum(matrix.weights for matrix in model.matrices)
    forward = model.block_forward_flops(length, lora)
    backward = model.block_backward_flops(length, lora)
    segments = []
    for block in range(model.layers):
        for index, matrix in enumerate(model.matrices):
            name = f"block {block} {matrix.name}"
            part = matrix.weights / weights
            unit = Unit(name, matrix.weights, matrix.weights if full else 0)
            unneeded = block == 0 and not full and matrix.name in _READS_EMBEDDINGS
            segments.append(
                Segment(
                    name,
                    part * forward,
                    part * backward,
                    (unit,),
                    block=index == 0,
                    in_backward=not unneeded,
                )
            )
    vectors = model.layers * (model.block_parameters - weights)
    adapters = model.layers * workload.block_adapters
    trained = vectors if full else adapters
    return Layout(root, tuple(segments), head, vectors + adapters, trained)
