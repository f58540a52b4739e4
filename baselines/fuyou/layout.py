"""Which parameters move together, and where their bytes lie in the file of the state.

A *unit* is what the device holds at once: a block, or all that is in no block or in several (the
root). Its trained parameters are one *group* or several, which the optimizer reads, steps and
writes one at a time; its frozen ones have a group of their own.

A trained group has three segments: float32 masters, moments, and what is computed with, which is
the masters themselves where the model computes in float32. Each has two places in the file, for
two generations of the state; what is never changed has one.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.nn as nn

from fcdp.cache.arena import aligned

FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Segment:
    """A part of a group in the file: its place in a generation, in bytes."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters whose bytes follow one another."""

    index: int
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]
    trained: bool
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """What all segments take, one after the other."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def start(self) -> int:
        return self.segments[0].offset

    @property
    def computed(self) -> Segment:
        """What the device computes with."""
        return self.segments[-1] if self.segments[-1].name == "compute" else self.segments[0]

    @property
    def gradient_bytes(self) -> int:
        return aligned(self.numel * FLOAT)

    def part(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of a segment in a buffer that holds the whole group."""
        found = next(segment for segment in self.segments if segment.name == name)
        return buffer[found.offset - self.start :][: found.nbytes]

    def views(self, part: torch.Tensor, dtype: torch.dtype, first: int = 0) -> list[torch.Tensor]:
        """Each parameter in bytes that begin with the first of them, ``first`` elements in."""
        flat = part.view(dtype)[first : first + self.numel]
        sizes = [shape.numel() for shape in self.shapes]
        return [x.view(s) for x, s in zip(flat.split(sizes), self.shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class Unit:
    """What the device holds at once."""

    name: str
    groups: tuple[Group, ...]

    @property
    def compute_bytes(self) -> int:
        return sum(group.computed.nbytes for group in self.groups)

    @property
    def trained(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.trained)


@dataclass
class Layout:
    """All units, the root first, and the file's regions."""

    dtype: torch.dtype
    root: Unit
    blocks: list[Unit] = field(default_factory=list)
    #: Bytes of one generation; gradients that are put aside lie after the second.
    generation: int = 0
    gradients: dict[int, int] = field(default_factory=dict)
    total: int = 0

    @property
    def units(self) -> list[Unit]:
        return [self.root, *self.blocks]

    def groups(self) -> Iterator[Group]:
        return chain.from_iterable(unit.groups for unit in self.units)

    def backward_order(self) -> list[Group]:
        """Trained groups in the order in which backward is done with them."""
        units = [*reversed(self.blocks), self.root]
        return [group for unit in units for group in unit.trained]

    @property
    def fingerprint(self) -> str:
        """Names, shapes and types, in short: files of another model are not read."""
        said = [(*group.names, *map(tuple, group.shapes), group.trained) for group in self.groups()]
        return f"{zlib.crc32(repr((str(self.dtype), said)).encode()):08x}"


def laid_out(
    model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, *, aside: bool
) -> Layout:
    """The layout of a model; ``aside``: with room for gradients."""
    owners = Counter(id(param) for block in blocks for param in set(block.parameters()))
    names = {id(param): name for name, param in model.named_parameters()}
    numels = [sum(param.numel() for param in block.parameters()) for block in blocks]
    planner = _Planner(dtype, max(numels, default=1), names)
    inside = {key for key, count in owners.items() if count == 1}
    root = [param for param in model.parameters() if id(param) not in inside]
    made = Layout(dtype, planner.unit("root", root))
    for index, block in enumerate(blocks):
        own = [param for param in block.parameters() if id(param) in inside]
        made.blocks.append(planner.unit(f"block {index}", own))
    made.generation = made.total = planner.end
    made.total *= 2
    for group in made.groups():
        if aside and group.trained:
            made.gradients[group.index] = made.total
            made.total += group.gradient_bytes
    return made


class _Planner:
    """Hands out places in the file."""

    def __init__(self, dtype: torch.dtype, most: int, names: dict[int, str]) -> None:
        """``most``: elements of a group, unless one parameter has more."""
        self._dtype = dtype
        self._most = most
        self._names = names
        self._count = 0
        self.end = 0

    def unit(self, name: str, params: Sequence[nn.Parameter]) -> Unit:
        trained = [param for param in params if param.requires_grad]
        frozen = [param for param in params if not param.requires_grad]
        groups = [self._group(run, trained=True) for run in self._runs(trained)]
        groups += [self._group(run, trained=False) for run in self._runs(frozen)]
        return Unit(name, tuple(groups))

    def _runs(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        runs: list[list[nn.Parameter]] = []
        room = 0
        for param in params:
            if param.numel() > room or not runs:
                runs.append([])
                room = self._most
            runs[-1].append(param)
            room -= param.numel()
        return runs

    def _group(self, params: Sequence[nn.Parameter], *, trained: bool) -> Group:
        numel = sum(param.numel() for param in params)
        wide, narrow = aligned(numel * FLOAT), aligned(numel * self._dtype.itemsize)
        sizes = {"master": wide, "moments": aligned(2 * numel * FLOAT)} if trained else {}
        if not trained or self._dtype != torch.float32:
            sizes["compute"] = narrow
        segments = []
        for name, nbytes in sizes.items():
            segments.append(Segment(name, self.end, nbytes))
            self.end += nbytes
        self._count += 1
        return Group(
            self._count - 1,
            tuple(self._names[id(param)] for param in params),
            tuple(params),
            tuple(param.shape for param in params),
            trained,
            tuple(segments),
        )
