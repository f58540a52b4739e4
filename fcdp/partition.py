"""The split of modules into units: blocks one by one, other kinds of parameters apart."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

#: Kind of parameters that may share a unit: one dtype, and either all frozen or all trainable.
_Key = tuple[torch.dtype, bool]

#: Adapters that stay gathered share units up to this size, as DDP's gradients share buckets: large
#: enough that a message's latency does not count, small enough that reductions start in backward.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Split:
    """Leaf modules apart from the blocks' own units, with one unit of their own.

    ``block`` is the first to call them: a block or the model itself.
    """

    block: nn.Module
    modules: list[nn.Module]
    key: _Key

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.modules))


def split_off(
    model: nn.Module, blocks: Sequence[nn.Module], ignored: Set[nn.Parameter] = frozenset()
) -> list[Split]:
    """Modules that must not share a block's own unit, block by block, then the model's own."""
    return [split for block in [*blocks, model] for split in _separate(block, blocks, ignored)]


def placement(param: nn.Parameter, world_size: int) -> Shard | None:
    """Return the dimension to shard a parameter along; ``None``: by rows, padded, as FSDP2 does.

    A low-rank factor of fewer rows than ranks would be mostly padding. It is sharded along another
    dimension if one divides evenly (FSDP2 asks for that), at the price of a copy on each side.
    """
    # A DTensor's part that tensor parallelism has left here is sharded.
    shape = param.to_local().shape if isinstance(param, DTensor) else param.shape
    if len(shape) < 2 or shape[0] >= world_size:
        return None
    even = (dim for dim in range(1, len(shape)) if shape[dim] % world_size == 0)
    return next(map(Shard, even), None)


def fit_in_a_slice(
    splits: Sequence[Split], blocks: Sequence[nn.Module], ranks_per_node: int
) -> bool:
    """Whether all that is split off takes no more memory than 1/L of the largest block."""
    largest = max(map(_nbytes, blocks), default=0)
    return sum(split.nbytes for split in splits) <= largest / ranks_per_node


def bucket(splits: Sequence[Split], model: nn.Module) -> list[Split]:
    """Join neighbours of one kind: one gather and one reduction where there would be many."""
    joined: list[Split] = []
    latest: dict[_Key, int] = {}
    for split in splits:
        index = latest.get(split.key)
        if index is not None and split.block is not model:
            other = joined[index]
            if other.nbytes + split.nbytes <= _BUCKET_BYTES:
                joined[index] = Split(other.block, other.modules + split.modules, other.key)
                continue
        latest[split.key] = len(joined)
        joined.append(split)
    return joined


def _separate(
    block: nn.Module, blocks: Sequence[nn.Module], ignored: Set[nn.Parameter]
) -> Iterator[Split]:
    """Split off one block.

    The block keeps the kind of parameter that it has most of. A module that holds several kinds
    itself, or is never called (``ParameterList``), cannot be split off and stays with the block.
    """
    others = {*blocks} - {block}
    kinds_of = {module: _kinds(module, ignored) for module in own_modules(block, others)}
    holders = [module for module, kinds in kinds_of.items() if kinds]
    sizes: Counter[_Key] = Counter()
    for module in holders:
        sizes.update(kinds_of[module])
    if len(sizes) < 2:
        return
    stays = max(sizes, key=lambda key: sizes[key])
    groups: dict[_Key, list[nn.Module]] = defaultdict(list)
    for module in holders:
        kinds = kinds_of[module]
        if set(kinds) == {stays}:
            continue
        called = type(module).forward is not nn.Module.forward
        if len(kinds) > 1 or not called or module is block:
            warnings.warn(
                f"fcdp.shard: {type(module).__name__} inside {type(block).__name__} cannot have a "
                "unit of its own; the block's frozen parameters will cross nodes every step",
                stacklevel=4,
            )
            continue
        groups[next(iter(kinds))].append(module)
    for key, modules in groups.items():
        yield Split(block, modules, key)


def own_modules(module: nn.Module, others: Set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it, without ``others`` inside it and what these hold."""
    yield module
    for child in module.children():
        if child not in others:
            yield from own_modules(child, others)


def _kinds(module: nn.Module, ignored: Set[nn.Parameter]) -> Counter[_Key]:
    """Elements that the module itself holds, by kind of parameter."""
    sizes: Counter[_Key] = Counter()
    for param in module.parameters(recurse=False):
        if param not in ignored:
            sizes[param.dtype, param.requires_grad] += param.numel()
    return sizes


def _nbytes(module: nn.Module) -> int:
    return sum(param.numel() * param.itemsize for param in module.parameters())
