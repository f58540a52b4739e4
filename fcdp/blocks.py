"""The blocks of a model, found by its structure: what is gathered one at a time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fcdp.fsdp2 import before_first_forward, prefetching

#: The blocks hold this share of the parameters of all lists of modules; what is left are heads,
#: adapters and the like.
_SHARE = 0.9
#: Candidates that an error names.
_NAMED = 6
#: Blocks whose gathers are under way on the CPU while one computes. The second crosses nodes while
#: the first is spread inside the node, which the thread that issues gathers waits for.
BLOCKS_AHEAD = 2


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


def prefetch_forward(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Start the gathers of blocks, and of what is gathered with them, while those before compute.

    Where one thread both computes and issues gathers (gloo), nothing overlaps unless it is issued
    early. On CUDA the host runs ahead by itself. A block that is called by itself starts none:
    ranks may call one that they keep gathered as often as each likes. What a user chooses, by
    ``set_modules_to_forward_prefetch``, stays.
    """
    assert isinstance(model, FSDPModule)
    modules = [module for module in (model, *blocks) if isinstance(module, FSDPModule)]
    add = {module: prefetching(module, model) for module in modules}

    def prefetch() -> None:
        inside = {*model.modules()}  # not what has been replaced since, as a resized embedding
        order = [module for module in add if module in inside]
        for index, module in enumerate(order):
            add[module](order[index + 1 :][:BLOCKS_AHEAD])

    before_first_forward(model, prefetch)


def _stacks(name: str, module: nn.Module, whole: frozenset[str]) -> Iterator[_Stack]:
    kind = _kind(module, whole) if name else None
    if kind is not None:
        yield _Stack(name, list(filter(_numel, module.children())), kind)
        return
    for child_name, child in module.named_children():
        yield from _stacks(f"{name}.{child_name}" if name else child_name, child, whole)


def _kind(module: nn.Module, whole: frozenset[str]) -> frozenset[str] | None:
    """Return the classes of a list's modules; ``None`` for any other module.

    Members of a ``ModuleList`` without parameters, as in the place of pruned blocks, do not count.
    """
    members = list(filter(_numel, module.children()))
    classes = frozenset(map(_class_name, members))
    if not members:
        return None
    if isinstance(module, nn.ModuleList):
        return whole if classes <= whole else classes
    of_blocks = type(module) in (nn.Sequential, nn.ModuleDict)
    several = of_blocks and 1 < len(members) == len([*module.children()])
    return classes if several and len(classes) == 1 else None


def _class_name(module: nn.Module) -> str:
    """Name the module's class, or the one that FSDP2 has replaced by its own."""
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
