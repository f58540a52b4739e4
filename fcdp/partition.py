"""The split of modules into units: blocks one by one, other kinds of parameters apart."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

#: Modules of one unit, usually one: as FSDP2's ``fully_shard([a, b])``.
Block = Sequence[nn.Module]
#: Kind of parameters that may share a unit: one dtype, and either all frozen or all trainable.
_Key = tuple[torch.dtype, bool]

#: Adapters that stay gathered share units up to this size, as DDP's gradients share buckets: large
#: enough that a message's latency does not count, small enough that reductions start in backward.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Split:
    """Parameters apart from the blocks' own units, with one unit of their own.

    It is gathered with its ``blocks``, whose modules may read what they do not call: one block,
    several, or the model itself. ``modules`` hold ``params`` and perhaps others.
    """

    blocks: list[Block]
    modules: list[nn.Module]
    params: dict[nn.Parameter, None]
    key: _Key

    @property
    def nbytes(self) -> int:
        return _nbytes(self.params)

    @property
    def others(self) -> set[nn.Parameter]:
        """Parameters inside the modules now that are not the split's."""
        inside = {param for module in self.modules for param in module.parameters()}
        return inside - self.params.keys()


def split_off(
    model: nn.Module, blocks: Sequence[Block], ignored: Set[nn.Parameter] = frozenset()
) -> list[Split]:
    """Modules that must not share a block's own unit, block by block, then the model's own."""
    return [split for block in [*blocks, [model]] for split in _separate(block, blocks, ignored)]


def placement(param: nn.Parameter, world_size: int) -> Shard | None:
    """Return the dimension to shard a parameter along; ``None``: by rows, padded, as FSDP2 does.

    A low-rank factor of fewer rows than ranks would be mostly padding. It is sharded along another
    dimension if one divides evenly (FSDP2 asks for that), at the price of a copy on each side.
    """
    # A DTensor's part that tensor parallelism has left here is sharded.
    shape = param.to_local().shape if isinstance(param, DTensor) else param.shape
    if len(shape) < 2 or shape[0] >= world_size or 0 in shape:
        return None
    even = (dim for dim in range(1, len(shape)) if shape[dim] % world_size == 0)
    return next(map(Shard, even), None)


def fit_in_a_slice(splits: Sequence[Split], blocks: Sequence[Block], ranks_per_node: int) -> bool:
    """Whether all that is split off takes no more memory than 1/L of the largest block."""
    sizes = (sum(_nbytes(module.parameters()) for module in block) for block in blocks)
    largest = max(sizes, default=0)
    return sum(split.nbytes for split in splits) <= largest / ranks_per_node


def bucket(splits: Sequence[Split], model: nn.Module) -> list[Split]:
    """Join neighbours of one kind: one gather and one reduction where there would be many."""
    joined: list[Split] = []
    latest: dict[_Key, int] = {}
    for split in splits:
        index = latest.get(split.key)
        if index is not None and split.blocks != [[model]]:
            other = joined[index]
            if other.nbytes + split.nbytes <= _BUCKET_BYTES:
                blocks, modules = other.blocks + split.blocks, other.modules + split.modules
                joined[index] = Split(blocks, modules, other.params | split.params, other.key)
                continue
        latest[split.key] = len(joined)
        joined.append(split)
    return joined


def _separate(block: Block, blocks: Sequence[Block], ignored: Set[nn.Parameter]) -> Iterator[Split]:
    """Split off one block.

    The block keeps the kind of parameter that it has most of, or holds itself. Of a module that
    holds two other kinds, and of the block itself, nothing can be split off.
    """
    held = {module: _kinds(module, ignored) for module in modules_of(block, blocks)}
    sizes: Counter[_Key] = Counter()
    for kinds in held.values():
        sizes.update({key: sum(param.numel() for param in kinds[key]) for key in kinds})
    if len(sizes) < 2:
        return
    own = {key for module in block for key in held[module]}
    stays = next(iter(own)) if len(own) == 1 else max(sizes, key=lambda key: sizes[key])
    groups: dict[_Key, list[nn.Module]] = defaultdict(list)
    kept: set[nn.Parameter] = set()
    for module, kinds in held.items():
        apart = kinds.keys() - {stays}
        if len(apart) == 1 and module not in block:
            groups[apart.pop()].append(module)
            continue
        kept.update(param for params in kinds.values() for param in params)
        if apart:
            warnings.warn(
                f"fcdp.shard: {type(module).__name__} inside {type(block[0]).__name__} cannot have "
                "a unit of its own; the block's frozen parameters will cross nodes every step",
                stacklevel=4,
            )
    for key, modules in groups.items():
        params = (param for module in modules for param in held[module][key])
        if split := dict.fromkeys(param for param in params if param not in kept):
            yield Split([block], modules, split, key)


def modules_of(block: Block, blocks: Sequence[Block]) -> dict[nn.Module, None]:
    """A block's modules and those inside them, without those of other blocks; in order."""
    others = {module for other in blocks for module in other} - {*block}
    return dict.fromkeys(each for module in block for each in own_modules(module, others))


def own_modules(module: nn.Module, others: Set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it, without ``others`` inside it and what these hold."""
    yield module
    for child in module.children():
        if child not in others:
            yield from own_modules(child, others)


def _kinds(module: nn.Module, ignored: Set[nn.Parameter]) -> dict[_Key, list[nn.Parameter]]:
    """Parameters that the module itself holds, by kind."""
    kinds: dict[_Key, list[nn.Parameter]] = defaultdict(list)
    for param in module.parameters(recurse=False):
        if param not in ignored:
            kinds[param.dtype, param.requires_grad].append(param)
    return kinds


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() * param.itemsize for param in params)
