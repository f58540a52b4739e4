"""Modules that share a unit: blocks, found by structure, and apart what differs in kind."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

#: Kind of parameters that may share a unit: one dtype, and either all frozen or all trainable.
_Key = tuple[torch.dtype, bool]

#: Adapters that stay gathered share units up to this size, as DDP's gradients share buckets: large
#: enough that a message's latency does not count, small enough that reductions start in backward.
_BUCKET_BYTES = 25 * 2**20
#: The blocks hold this share of the parameters of all lists of modules; what is left are heads,
#: adapters and the like.
_SHARE = 0.9
#: Candidates that an error names.
_NAMED = 6
#: Blocks whose gathers are under way on the CPU while one computes. The second crosses nodes while
#: the first is spread inside the node, which the thread that issues gathers waits for.
BLOCKS_AHEAD = 2


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
    """Where to cut a parameter; ``None``: by rows, as FSDP2 does, filled up to a row for each rank.

    Of a low-rank factor with fewer rows than ranks most would be filling. It is cut along another
    dimension if one divides evenly (FSDP2 asks for that), at the price of a copy on each side.
    """
    # A DTensor's part that tensor parallelism has left here is cut.
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


@dataclass(frozen=True)
class _Stack:
    """A list of modules, in no other one."""

    name: str
    modules: list[nn.Module]
    #: Class names; stacks of equal kinds are blocks together (encoder and decoder).
    kind: frozenset[str]

    @property
    def numel(self) -> int:
        return sum(map(_numel, self.modules))

    def __str__(self) -> str:
        return f"{self.name} ({len(self.modules)} × {' or '.join(sorted(self.kind))})"


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, in the order of ``named_modules``.

    Blocks are the members of the outermost ``ModuleList``, or of a ``Sequential`` or ``ModuleDict``
    of one class; of several such lists all whose members are of the same classes, or of classes
    that ``transformers`` says are not to be split, if they hold most of the parameters.

    Raises ``ValueError`` that lists candidates where there is none, or several are as likely.
    """
    # A model of ``transformers`` has them, whatever is wrapped around it.
    named = (getattr(module, "_no_split_modules", None) for module in model.modules())
    never_split = frozenset(name for names in named for name in names or ())
    stacks = [*_stacks("", model, never_split)]
    by_kind: dict[frozenset[str], list[_Stack]] = defaultdict(list)
    for stack in stacks:
        by_kind[stack.kind].append(stack)
    total = sum(stack.numel for stack in stacks)
    for alike in by_kind.values():
        if sum(stack.numel for stack in alike) >= _SHARE * total:
            return [module for stack in alike for module in stack.modules]
    if stacks:
        listed = ", ".join(map(str, stacks[:_NAMED]))
        raise ValueError(
            f"units: {type(model).__name__} has several lists of modules that may be its blocks: "
            f"{listed}; pass the modules to gather one at a time, such as "
            f"units=model.{stacks[0].name}"
        )
    raise ValueError(
        f"units: {type(model).__name__} has no list of blocks (nn.ModuleList); pass the modules to "
        f"gather one at a time. Its largest parts are {_largest_parts(model)}"
    )


def prefetch_forward(
    model: nn.Module, blocks: Sequence[nn.Module], splits: Sequence[Split]
) -> None:
    """Start the gathers of blocks and of their adapters while the blocks before them compute.

    Where one thread both computes and issues gathers (gloo), nothing overlaps unless it is issued
    early. On CUDA the host runs ahead by itself.
    """
    order = [model, *blocks]
    for index, module in enumerate(order):
        assert isinstance(module, FSDPModule)
        called = [
            unit
            for block in order[index + 1 :][:BLOCKS_AHEAD]
            for unit in (block, *(split.modules[0] for split in splits if split.block is block))
        ]
        module.set_modules_to_forward_prefetch(
            [unit for unit in called if isinstance(unit, FSDPModule)]
        )


def _stacks(name: str, module: nn.Module, whole: frozenset[str]) -> Iterator[_Stack]:
    kind = _kind(module, whole) if name else None
    if kind is not None:
        yield _Stack(name, list(module.children()), kind)
        return
    for child_name, child in module.named_children():
        yield from _stacks(f"{name}.{child_name}" if name else child_name, child, whole)


def _kind(module: nn.Module, whole: frozenset[str]) -> frozenset[str] | None:
    """The classes of a list of modules; ``None`` for a module that is no such list."""
    members = list(module.children())
    classes = frozenset(map(_class_name, members))
    if not members or not all(map(_numel, members)):
        return None
    if isinstance(module, nn.ModuleList):
        return whole if classes <= whole else classes
    several = type(module) in (nn.Sequential, nn.ModuleDict) and len(members) > 1
    return classes if several and len(classes) == 1 else None


def _class_name(module: nn.Module) -> str:
    """Its class, or the one that FSDP2 has put its own in the place of."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _largest_parts(model: nn.Module) -> str:
    sizes = Counter({name: _numel(child) for name, child in model.named_children()})
    parts = [
        f"{name} ({type(model.get_submodule(name)).__name__}, {numel:,} parameters)"
        for name, numel in sizes.most_common(_NAMED)
        if numel
    ]
    return ", ".join(parts) or "its own parameters alone"


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
