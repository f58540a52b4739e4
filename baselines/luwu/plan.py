"""A run's plan, which all roles share: its layers, and in which chunks and order they cross."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import Field

from baselines.luwu.wire import LARGEST_CHUNK
from baselines.optimizers import AdamW
from baselines.settings import Strict

#: The layer of what is outside of the blocks: embeddings and head. Block i is layer i + 1.
ROOT = 0


class Pass(IntEnum):
    """An order in which layers are needed."""

    FORWARD = 0
    BACKWARD = 1


class Frozen(IntEnum):
    """Frozen parameters that a pass brings: none, all, or each once."""

    NONE = 0
    ALL = 1
    ONCE = 2


class Parameter(Strict):
    """A parameter's name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Layer(Strict):
    """A layer: what is pulled and pushed together."""

    trained: tuple[Parameter, ...]
    frozen: tuple[Parameter, ...]

    def numel(self, *, trained: bool) -> int:
        """Elements of the trained parameters, or of the frozen ones."""
        return sum(each.numel for each in (self.trained if trained else self.frozen))


@dataclass(frozen=True)
class Chunk:
    """A part of a layer that crosses in one message: elements of its trained or frozen ones."""

    layer: int
    #: Counted over the layer, trained ones first.
    index: int
    trained: bool
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def key(self) -> str:
        """Name that no other chunk of the plan has."""
        return f"{self.layer} {self.index}"


class Plan(Strict):
    """Plan of a run, on which its roles agree."""

    workers: Annotated[int, Field(ge=1)]
    layers: Annotated[tuple[Layer, ...], Field(min_length=2)]
    #: Type of parameters and gradients as they cross, and as workers compute with them.
    dtype: Literal["float32", "bfloat16"]
    chunk_bytes: Annotated[int, Field(ge=4096, le=LARGEST_CHUNK)]
    learning_rate: float
    optimizer: AdamW
    threads: Annotated[int, Field(ge=4)]
    pipeline: Literal["step", "layer"]
    merged: bool

    @property
    def type(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def chunks(self, layer: int) -> list[Chunk]:
        """A layer's chunks, trained ones first."""
        size = self.chunk_bytes // self.type.itemsize
        chunks: list[Chunk] = []
        for trained in (True, False):
            numel = self.layers[layer].numel(trained=trained)
            for begin in range(0, numel, size):
                end = min(begin + size, numel)
                chunks.append(Chunk(layer, len(chunks), trained, begin, end))
        return chunks

    def all_chunks(self) -> Iterator[Chunk]:
        for layer in range(len(self.layers)):
            yield from self.chunks(layer)

    def stream(self, order: Pass, frozen: Frozen) -> list[tuple[int, list[Chunk]]]:
        """The layers that a pass needs, one after another, each with the chunks that it brings.

        Forward needs the root first and last. Backward begins while it is still there, and does not
        need it again: embeddings pass no gradient on.
        """
        blocks = range(1, len(self.layers))
        layers = [ROOT, *blocks, ROOT] if order == Pass.FORWARD else [*reversed(blocks)]
        seen: set[int] = set()
        stream = []
        for layer in layers:
            brings = frozen == Frozen.ALL or (frozen == Frozen.ONCE and layer not in seen)
            seen.add(layer)
            stream.append((layer, [c for c in self.chunks(layer) if c.trained or brings]))
        return stream
