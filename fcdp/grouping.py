"""The rules of parameter groups: who shares one, what stays gathered, what a cache entry takes.

Where sums of their gradients wait is one of them.

They are functions of sizes and flags: the library asks them about a model's parameters, the
performance model about numbers that it counts. Imports no torch.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Literal, TypeVar

#: Where the partial gradients of ``fcdp.accumulate`` wait.
PartialsPlace = Literal["device", "host"]
#: A user's choice: a place; ``auto``, the place that has room; or ``each``, where none wait as
#: the gradients of each micro-batch cross nodes.
PartialsChoice = Literal["auto", "device", "host", "each"]

#: Adapters that stay gathered share units up to this size, as DDP's gradients share buckets: large
#: enough that a message's latency does not count, small enough that reductions start in backward.
BUCKET_BYTES = 25 * 2**20

#: Share of the free device memory that partial gradients may take; larger ones wait in host memory.
#: The rest is left to what comes after set-up: activations and the optimizer's states.
SUMS_SHARE = 0.1

#: The kind of parameters that may share a unit: their dtype, and whether they are trained.
_Key = TypeVar("_Key", bound=Hashable)


def kept(numel: Mapping[_Key, int], own: Set[_Key] = frozenset()) -> _Key:
    """The kind of parameters that keeps a block's own unit; those of other kinds leave it.

    ``numel`` has the elements of each kind in the block, and ``own`` the kinds that the block's
    module holds itself, of which nothing can be split off.
    """
    if len(own) == 1:
        return next(iter(own))
    return max(numel, key=lambda key: numel[key])


def stay_gathered(apart: Iterable[float], blocks: Iterable[float], ranks_per_node: int) -> bool:
    """Whether what has left the blocks' units stays gathered from forward to backward.

    It does if all of it takes no more than 1/L of the largest block. Both are the bytes of whole
    parameters, each in the dtype in which it is held.
    """
    return sum(apart) <= max(blocks, default=0) / ranks_per_node


def buckets(parts: Sequence[tuple[_Key, float]]) -> list[list[int]]:
    """Join neighbours of one kind: one gather and one reduction where there would be many.

    Args:
        parts: Kind and bytes of what has left each block's unit, in the order of the blocks.

    Returns:
        The indices of the parts in each bucket; buckets are in the order of their first parts.
    """
    joined: list[list[int]] = []
    latest: dict[_Key, list[int]] = {}
    for index, (key, nbytes) in enumerate(parts):
        bucket = latest.get(key)
        if bucket is None or sum(parts[at][1] for at in bucket) + nbytes > BUCKET_BYTES:
            bucket = latest[key] = []
            joined.append(bucket)
        bucket.append(index)
    return joined


def cut(shape: Sequence[int], world_size: int) -> int | None:
    """The dimension to shard a parameter along; ``None``: by rows, padded, as FSDP2 does.

    A low-rank factor of fewer rows than ranks would be mostly padding. It is sharded along another
    dimension if one divides evenly (FSDP2 asks for that), at the price of a copy on each side.
    """
    if len(shape) < 2 or shape[0] >= world_size or 0 in shape:
        return None
    return next((dim for dim in range(1, len(shape)) if shape[dim] % world_size == 0), None)


def reuses(*, in_backward: bool, frozen: bool) -> int:
    """How often a step of one micro-batch gathers a unit again without it having changed.

    Backward may gather it again, and the next step's forward does so if no optimizer steps it.
    """
    return in_backward + frozen


def entry_bytes(shard_bytes: int, nodes: int) -> int:
    """Bytes of a rank's cache entry: what the other nodes have sent. Its own shard is at hand."""
    return (nodes - 1) * shard_bytes


def sums_fit(nbytes: float, free: float) -> bool:
    """Whether partial gradients wait on a device: they take at most a tenth of its free memory."""
    return nbytes <= SUMS_SHARE * free


def disk_buffers(look_ahead: int) -> int:
    """Buffers for entries on their way: one to load from, one to write from, others to read ahead.

    They lie in host memory, and each has room for the largest entry on the disk.
    """
    return look_ahead + 2
