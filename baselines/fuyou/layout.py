"""Which parameters move together, and in which segments their bytes are read and written.

A *layer* is what the device holds at once: a block, or all that is in no block or in several (the
root). Its trained parameters are one *group* or several, which the optimizer reads, steps and
writes one at a time; its frozen ones have a group of their own.

A trained group has three segments: float32 masters, moments, and what is computed with, which is
the masters themselves where the model computes in float32.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count

import torch
import torch.nn as nn

from baselines.part import split
from baselines.strategy import numel
from fcdp.arena import aligned

FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Segment:
    """A part of a group, which is read and written at once: its place in the group, in bytes."""

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
        """Bytes of all segments, one after the other."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def computed(self) -> Segment:
        """The segment that the device computes with."""
        return self.segments[-1] if self.segments[-1].name == "compute" else self.segments[0]

    @property
    def gradient_bytes(self) -> int:
        return aligned(self.numel * FLOAT)

    def part(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of a segment in a buffer that holds the whole group."""
        segment = next(s for s in self.segments if s.name == name)
        return buffer[segment.offset :][: segment.nbytes]

    def views(self, part: torch.Tensor, dtype: torch.dtype, first: int = 0) -> list[torch.Tensor]:
        """A view of each parameter; they begin ``first`` elements into ``part``."""
        flat = part.view(dtype)[first : first + self.numel]
        sizes = [shape.numel() for shape in self.shapes]
        return [x.view(s) for x, s in zip(flat.split(sizes), self.shapes, strict=True)]

    def states(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """Masters, first and second moments (float32) of a trained group, by parameter."""
        moments = self.part(buffer, "moments")
        return [
            self.views(self.part(buffer, "master"), torch.float32),
            self.views(moments, torch.float32),
            self.views(moments, torch.float32, self.numel),
        ]


@dataclass(frozen=True, eq=False)
class Layer:
    """Parameters that the device holds at once."""

    groups: tuple[Group, ...]

    @property
    def compute_bytes(self) -> int:
        return sum(group.computed.nbytes for group in self.groups)

    @property
    def trained(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.trained)


@dataclass
class Layout:
    """All layers, the root first, and room for gradients."""

    dtype: torch.dtype
    root: Layer
    blocks: list[Layer]
    #: Offsets of the gradients that are put aside, by group, and the bytes of them all.
    gradients: dict[int, int] = field(default_factory=dict)
    aside_bytes: int = 0

    @property
    def layers(self) -> list[Layer]:
        return [self.root, *self.blocks]

    def groups(self) -> Iterator[Group]:
        return chain.from_iterable(layer.groups for layer in self.layers)

    def backward_order(self) -> list[Group]:
        """Trained groups in the order in which backward is done with them."""
        layers = [*reversed(self.blocks), self.root]
        return [group for layer in layers for group in layer.trained]

    @property
    def fingerprint(self) -> str:
        """A checksum of names, shapes and types: files of another model are not read."""
        groups = [(*g.names, *map(tuple, g.shapes), g.trained) for g in self.groups()]
        return f"{zlib.crc32(repr((str(self.dtype), groups)).encode()):08x}"


def cast(group: Group, buffer: torch.Tensor) -> None:
    """Cast the masters to what the model computes in, if that is another type."""
    if group.computed.name == "compute":
        masters = group.part(buffer, "master").view(torch.float32)[: group.numel]
        computed = group.part(buffer, "compute")
        computed.view(torch.bfloat16)[: group.numel].copy_(masters)


def laid_out(
    model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, *, aside: bool
) -> Layout:
    """The layout of a model; ``aside``: with room for gradients."""
    names = {id(param): name for name, param in model.named_parameters()}
    most = max((numel(block.parameters()) for block in blocks), default=1)
    indices = count()

    def group(params: Sequence[nn.Parameter], trained: bool) -> Group:
        elements = numel(params)
        sizes: dict[str, int] = {}
        if trained:
            sizes = {"master": aligned(elements * FLOAT), "moments": aligned(2 * elements * FLOAT)}
        if not trained or dtype != torch.float32:
            sizes["compute"] = aligned(elements * dtype.itemsize)
        ends = accumulate(sizes.values())
        return Group(
            next(indices),
            tuple(names[id(param)] for param in params),
            tuple(params),
            tuple(param.shape for param in params),
            trained,
            tuple(Segment(n, end - sizes[n], sizes[n]) for n, end in zip(sizes, ends, strict=True)),
        )

    def layer(params: Sequence[nn.Parameter]) -> Layer:
        return Layer(
            tuple(
                group(run, trained)
                for trained in (True, False)
                for run in _runs([p for p in params if p.requires_grad == trained], most)
            )
        )

    root, in_one = split([*model.parameters()], blocks)
    inside = {id(param) for param in in_one}
    by_block = ([p for p in block.parameters() if id(p) in inside] for block in blocks)
    made = Layout(dtype, layer(root), [layer(params) for params in by_block])
    for each in made.groups():
        if aside and each.trained:
            made.gradients[each.index] = made.aside_bytes
            made.aside_bytes += each.gradient_bytes
    return made


def _runs(params: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Cut parameters into groups of at most ``most`` elements, unless a single one has more."""
    runs: list[list[nn.Parameter]] = []
    room = 0
    for param in params:
        if param.numel() > room or not runs:
            runs.append([])
            room = most
        runs[-1].append(param)
        room -= param.numel()
    return runs
