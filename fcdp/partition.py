"""The split of modules into units: blocks one by one, other kinds of parameters apart."""

import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import Shard

from fcdp import grouping
from fcdp.extensions import held_bytes, is_extended, local_of

#: Modules of one unit, usually one: as FSDP2's ``fully_shard([a, b])``.
Block = Sequence[nn.Module]
#: Kind of parameters that may share a unit: one dtype, and either all frozen or all trainable.
_Key = tuple[torch.dtype, bool]


@dataclass(frozen=True)
class Split:
    """Parameters apart from the blocks' own units, with one unit of their own.

    It is gathered with its ``blocks``, whose modules may read what they do not call: one block,
    several, or the model itself. ``modules`` hold ``params`` and perhaps others.
    """

    blocks: list[Block]
    modules: list[nn.Module]
    params: dict[nn.Parameter, None]
    _: KW_ONLY
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
    splits: list[Split] = []
    # No comprehension, which is one more caller for a warning before Python 3.12.
    for block in [*blocks, [model]]:
        splits += _separate(block, blocks, ignored)
    return splits


def placement(param: nn.Parameter, world_size: int) -> Shard | None:
    """Return where to shard a parameter, as ``fully_shard`` asks: see ``fcdp.grouping.cut``."""
    # A DTensor's part that tensor parallelism has left here is sharded.
    dim = grouping.cut(local_of(param).shape, world_size)
    return None if dim is None else Shard(dim)


def fit_in_a_slice(splits: Sequence[Split], blocks: Sequence[Block], ranks_per_node: int) -> bool:
    """Whether all that is split off may stay gathered: see ``fcdp.grouping.stay_gathered``."""
    sizes = (sum(_nbytes(module.parameters()) for module in block) for block in blocks)
    return grouping.stay_gathered((split.nbytes for split in splits), sizes, ranks_per_node)


def bucket(splits: Sequence[Split], model: nn.Module) -> list[Split]:
    """Join what is split off neighbouring blocks: see ``fcdp.grouping.buckets``.

    What is split off the model itself comes last, and is not joined.
    """
    of_blocks = [split for split in splits if split.blocks != [[model]]]
    together = grouping.buckets([(split.key, split.nbytes) for split in of_blocks])
    joined = [functools.reduce(_join, map(of_blocks.__getitem__, bucket)) for bucket in together]
    return joined + [split for split in splits if split.blocks == [[model]]]


def _join(one: Split, other: Split) -> Split:
    blocks, modules = one.blocks + other.blocks, one.modules + other.modules
    return Split(blocks, modules, one.params | other.params, key=one.key)


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
    stays = grouping.kept(sizes, own)
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
                stacklevel=6,  # who called ``fcdp.shard``
            )
    for key, modules in groups.items():
        params = (param for module in modules for param in held[module][key])
        if split := dict.fromkeys(param for param in params if param not in kept):
            yield Split([block], modules, split, key=key)


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
    return sum(
        held_bytes(param) if is_extended(param) else param.numel() * param.itemsize
        for param in params
    )
